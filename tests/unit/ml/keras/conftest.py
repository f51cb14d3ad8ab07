"""Keras of the tests runs on torch, whatever it is configured for; its threads are made before a test counts them."""

from __future__ import annotations

import pytest

import settled_keras

settled_keras.on_torch()


@pytest.fixture(scope="session", autouse=True)
def _keras_settled() -> None:
    settled_keras.settle()
