"""Silences one warning of DDP's, about an option that users of the estimator can't set (rank)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel


class _One(torch.nn.Module):
    """A module of one parameter, which it uses."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self) -> torch.Tensor:
        """Return the parameter, times one."""
        return self.weight * 1


class _WithPythonsWarnings(torch.autograd.Function):
    """Within `apply`, C++ code of torch gives its warnings to Python; elsewhere DDP's go to stderr."""

    @staticmethod
    def forward(_: Any, call: Callable[[], Any]) -> None:
        """Call a function, with gradients enabled."""
        with torch.enable_grad():
            call()


def spend_warning() -> None:
    """Let DDP warn now, unseen, that `find_unused_parameters=True` found no unused ones. A collective call.

    It does so once a process (TORCH_WARN_ONCE in reducer.cpp); later, only the log level of all of torch could hide it.
    """
    net = DistributedDataParallel(_One(), find_unused_parameters=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _WithPythonsWarnings.apply(net)  # type: ignore[no-untyped-call]
