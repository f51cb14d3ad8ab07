"""Which tests start no JVM, and which processes of pytest-xdist take only such."""

from __future__ import annotations

# Directories and files below tests/ whose tests start no JVM.
NO_JVM = (
    "unit/",
    "compat/test_",
    "faults/test_any_moment.py",
    "faults/test_checkpoint_crash.py",
    "faults/test_connections.py",
    "faults/test_driver_killed.py",
    "faults/test_rank_raises.py",
    "faults/test_retry.py",
    "faults/test_secondary_errors.py",
    "faults/test_stall.py",
    "faults/test_training_continues.py",
    "frameworks/test_huggingface.py",
    "frameworks/test_keras.py",
    "frameworks/test_lightgbm.py",
    "frameworks/test_lightning.py",
    "frameworks/test_mpi.py",
    "frameworks/test_packed_batch.py",
    "frameworks/test_programs.py",
    "frameworks/test_tensorflow.py",
    "frameworks/test_torch.py",
)


def starts_no_jvm(worker: str) -> bool:
    """Return whether a process of pytest-xdist, gw0 and on, is beyond the second."""
    return int(worker.removeprefix("gw")) > 1
