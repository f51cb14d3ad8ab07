"""Spark's check of how many bytes an Arrow batch holds, left out where no batch can hold too many (driver).

Spark asks every Arrow vector for its size after every row that it writes for `mapInArrow`: 0.6 µs a row, which for rows
of 64 floats is more than to write them. The check keeps a batch of wide rows from filling an executor's memory.
"""

from __future__ import annotations

import re
from typing import Any

from tritium.spark.inside import Inside
from tritium.spark.inside.plans import optimized

SETTING = "spark.sql.execution.arrow.maxBytesPerBatch"
UNCHECKED = str(2**31 - 1)  # Spark compares nothing then.
_RECORDS = "spark.sql.execution.arrow.maxRecordsPerBatch"
_DEFAULT = 64 << 20  # Of Spark 4.2.
_PYTHON = re.compile("InPandas|InArrow|InPySpark|Python")


def probe(spark: Any) -> str | None:
    """Return why the check can't be left out in this session; None where it can."""
    from py4j.clientserver import ClientServer

    if int(spark.conf.get(_RECORDS)) and not isinstance(spark.sparkContext._gateway, ClientServer):
        return "threads share the JVM's, and what is set for them (PYSPARK_PIN_THREAD=false)"
    return None


used = Inside("batch_bytes", probe)


def leave_out_check(job: Any, row_bytes: int | None) -> None:
    """Let the jobs of this thread leave out the check, where no batch of `job` can hold too many bytes.

    A setting of the session's wins.

    job       : a DataFrame of one `mapInArrow`.
    row_bytes : what a row takes at most; None: any number.
    """
    spark = job.sparkSession
    if used(spark) and out_of_reach(job, row_bytes):
        spark.sparkContext.setLocalProperty(SETTING, UNCHECKED)


def out_of_reach(job: Any, row_bytes: int | None) -> bool:
    """Return whether the batches of `job`, a DataFrame of one `mapInArrow` over rows of so many bytes, are all small.

    Spark's setting holds for all of a job, so none of its sources may be computed in Python.
    """
    if row_bytes is None:
        return False
    records = int(job.sparkSession.conf.get(_RECORDS))
    if records <= 0 or records * row_bytes > _DEFAULT:
        return False
    return len(_PYTHON.findall(optimized(job))) == 1
