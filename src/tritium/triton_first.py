"""Import triton before TensorFlow (any process).

After TensorFlow (2.21), the import of triton (3.7) ends the process with SIGSEGV. torch's optimizers and Keras on torch
import triton; Keras and TensorBoard import TensorFlow where it is installed.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec


def import_triton() -> None:
    """Import triton, where it is installed. Call it right before TensorFlow is imported."""
    if find_spec("triton") is not None:
        importlib.import_module("triton")
