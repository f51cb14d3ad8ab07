"""What a function with a training loop of its own in PyTorch may call (rank)."""

from __future__ import annotations

from tritium.frameworks.torch_memory import host_memory

__all__ = ["host_memory"]
