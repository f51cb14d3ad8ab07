"""The contract of all engines, on Spark, of Keras, whose workers import TensorFlow. Others: tests/spark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras  # noqa: F401 - it sets variables of the environment
import pytest

import engines


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_a_batch_a_stream_and_an_evaluator(spark: Any, tmp_path: Path) -> None:
    engines.check_on_spark(spark, engines.case_of("keras"), tmp_path)
