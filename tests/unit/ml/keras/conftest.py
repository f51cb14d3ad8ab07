"""Keras of the tests runs on torch, whatever it is configured for; its threads are made before a test counts them."""

from __future__ import annotations

import settled_keras

settled_keras.settle()
