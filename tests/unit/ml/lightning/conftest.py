"""What Lightning keeps open in a process is there before a test counts it."""

from __future__ import annotations

import pytest

import settled


@pytest.fixture(scope="session", autouse=True)
def _lightning_settled() -> None:
    settled.settle_lightning()
