"""Keras of the tests runs on torch, whatever it is configured for; its threads are made before a test counts them."""

from __future__ import annotations

import pytest

import settled

settled.keras_on_torch()


@pytest.fixture(scope="session", autouse=True)
def _keras_settled() -> None:
    settled.settle_keras()
