"""A SparkSession, classic or Connect (driver)."""

from __future__ import annotations

from typing import Any


def is_connect(spark: Any) -> bool:
    """Return whether this session is a client of Spark Connect."""
    return type(spark).__module__.startswith("pyspark.sql.connect")
