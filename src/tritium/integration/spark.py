"""Predictions and a split of rows as columns of a DataFrame, and settings of a session (driver)."""

from __future__ import annotations

from tritium.ml.validation import drawn
from tritium.predict.spark import score
from tritium.spark import is_connect
from tritium.spark.inside.hadoop import default_file_system
from tritium.spark.inside.hadoop import settings as hadoop_settings

__all__ = ["default_file_system", "drawn", "hadoop_settings", "is_connect", "score"]
