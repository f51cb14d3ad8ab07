"""All that knows a SparkSession: its cluster, its jobs, its errors, and the inside of Spark (driver).

`is_connect` is the one place that tells Spark Connect from a classic session.
"""

from __future__ import annotations

from typing import Any


def is_connect(spark: Any) -> bool:
    """Return whether this session, or the session of this DataFrame, is a client of Spark Connect."""
    return type(spark).__module__.startswith("pyspark.sql.connect")
