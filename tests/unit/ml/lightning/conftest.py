"""What Lightning keeps open in a process is there before a test counts it."""

from __future__ import annotations

import pytest

import settled_lightning


@pytest.fixture(scope="session", autouse=True)
def _lightning_settled() -> None:
    settled_lightning.settle()
