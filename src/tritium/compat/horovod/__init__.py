"""Horovod's API on PyTorch's own process groups (rank)."""

__version__ = "0.28.1"  # whose API this is
