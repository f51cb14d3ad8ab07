"""PyTorch: what a rank imports before the user's function runs, while its supervisor spools its shard (rank)."""

from __future__ import annotations

import contextlib
import importlib

PACKAGE = "torch"
# What torch imports at the first use of an optimizer and of DDP: most of a second, better spent before the first step.
_LATER = ("torch.distributed", "torch.nn.parallel", "torch._dynamo")


def load() -> None:
    """Import torch. Raises ImportError where it is missing."""
    importlib.import_module(PACKAGE)
    for name in _LATER:
        with contextlib.suppress(ImportError):  # a torch that was built without it does not need it either
            importlib.import_module(name)
