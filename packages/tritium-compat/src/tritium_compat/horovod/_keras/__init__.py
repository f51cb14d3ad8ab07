"""What `horovod.keras` and `horovod.tensorflow.keras` share (rank)."""

from tritium_compat.horovod import basics as basics  # first: it says what to do where PyTorch is missing
