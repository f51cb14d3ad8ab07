"""Spark's check of how many bytes an Arrow batch holds, left out where no batch can hold too many (driver).

Spark asks every Arrow vector for its size after every row that it writes for `mapInArrow`: 0.6 µs a row, which for rows
of 64 floats is more than to write them. The check keeps a batch of wide rows from filling an executor's memory.
"""

from __future__ import annotations

import re
from typing import Any

SETTING = "spark.sql.execution.arrow.maxBytesPerBatch"
UNCHECKED = str(2**31 - 1)  # Spark compares nothing then
_RECORDS = "spark.sql.execution.arrow.maxRecordsPerBatch"
_DEFAULT = 64 << 20  # of Spark 4.2
_PYTHON = re.compile("InPandas|InArrow|InPySpark|Python")


def out_of_reach(job: Any, row_bytes: int | None) -> bool:
    """Return whether the batches of `job`, a DataFrame of one `mapInArrow` over rows of so many bytes, are all small.

    Spark's setting holds for all of a job, so none of its sources may be computed in Python.
    """
    if row_bytes is None:
        return False
    records = int(job.sparkSession.conf.get(_RECORDS))
    if records <= 0 or records * row_bytes > _DEFAULT:
        return False
    return len(_PYTHON.findall(job._jdf.queryExecution().optimizedPlan().toString())) == 1
