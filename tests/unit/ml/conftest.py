"""What torch does once in a process is done before the tests of trainings, which would seem to leave it behind."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def _torch_settled() -> None:
    """Make a first optimizer, for which torch sets an environment variable and a cache directory."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
