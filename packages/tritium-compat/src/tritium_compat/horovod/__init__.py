"""Horovod's API on PyTorch's own process groups (driver and rank)."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.28.1"  # whose API this is


def __getattr__(name: str) -> Any:
    if name != "run":
        raise AttributeError(f"module 'horovod' has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.runner").run
