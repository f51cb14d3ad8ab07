"""Estimators of all frameworks in one process."""

from __future__ import annotations

import pytest
import sklearn  # noqa: F401 - LightGBM's, which sets environment variables at its import: not in a test

import settled_keras
import settled_lightning


@pytest.fixture(scope="session", autouse=True)
def _settled() -> None:
    settled_keras.settle()
    settled_lightning.settle()
