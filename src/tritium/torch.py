"""Functions for a training loop of the user's own in PyTorch (rank)."""

from __future__ import annotations

from tritium.frameworks.torch_memory import host_memory

__all__ = ["host_memory"]
