"""Estimators of all frameworks in one process."""

from __future__ import annotations

import pytest

import settled_keras


@pytest.fixture(scope="session", autouse=True)
def _keras_settled() -> None:
    settled_keras.settle()
