"""Estimators of all frameworks in one process, as in tests/estimators."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

import settled
from device_processes import end


@pytest.fixture(scope="session", autouse=True)
def _settled() -> None:
    if find_spec("keras") is not None:
        settled.settle_keras()
    settled.settle_lightning()
    import torch

    torch.zeros(1, device="cuda")  # CUDA stays in this process, with the files and variables of its driver


@pytest.fixture(autouse=True)
def _engine_processes_end() -> Iterator[None]:
    """End those that a test has started: they would wait a minute for another task."""
    yield
    end()
