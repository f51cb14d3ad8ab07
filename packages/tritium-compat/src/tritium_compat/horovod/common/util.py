"""`horovod.common.util`: what is built in (rank)."""

from __future__ import annotations

import importlib

from tritium_compat.horovod.basics import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    mpi_built,
    nccl_built,
    rocm_built,
)


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether `horovod.NAME` can be imported: "torch", "tensorflow", "keras", "spark"."""
    try:
        importlib.import_module(f"tritium_compat.horovod.{ext_base_name}")
    except ImportError:
        return False
    return True


__all__ = [
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "extension_available",
    "gloo_built",
    "mpi_built",
    "nccl_built",
    "rocm_built",
]
