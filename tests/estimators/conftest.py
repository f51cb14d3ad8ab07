"""Estimators of all frameworks in one process."""

from __future__ import annotations

import pytest
import sklearn  # noqa: F401 - LightGBM's, which sets environment variables at its import: not in a test

import settled


@pytest.fixture(scope="session", autouse=True)
def _settled() -> None:
    settled.settle_keras()
    settled.settle_lightning()
