"""Horovod's API on PyTorch's own process groups (rank)."""
