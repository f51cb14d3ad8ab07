"""The contract of all engines, on Spark. Keras, whose workers import TensorFlow, is in tests/frameworks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightgbm  # noqa: F401 - it sets variables of the environment, as torch does
import onnxruntime  # noqa: F401 - it writes a file into TMPDIR
import pytest

import engines


@pytest.mark.parametrize("name", [name for name in engines.NAMES if name != "keras"])
def test_a_batch_a_stream_and_an_evaluator(spark: Any, name: str, tmp_path: Path) -> None:
    engines.check_on_spark(spark, engines.case_of(name), tmp_path)
