"""Spark's check of how many bytes an Arrow batch holds, left out where no batch can hold too many (driver).

Spark asks every Arrow vector for its size after every row that it writes for `mapInArrow`: 0.6 µs a row, which for rows
of 64 floats is more than to write them. The check keeps a batch of wide rows from filling an executor's memory.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tritium.data.schema import Field

SETTING = "spark.sql.execution.arrow.maxBytesPerBatch"
UNCHECKED = str(2**31 - 1)  # Spark compares nothing then
_RECORDS = "spark.sql.execution.arrow.maxRecordsPerBatch"
_DEFAULT = 64 << 20  # of Spark 4.2
_PYTHON = re.compile("InPandas|InArrow|InPySpark|Python")


def most_bytes(fields: Iterable[Field], shapes: Mapping[str, Sequence[int]]) -> int | None:
    """Return what a row of these Fields takes at most in Arrow; None where an array or a string may have any length.

    shapes : column → the shape of one row, of arrays whose rows have been seen and are all alike.
    """
    total = 64  # ids, offsets, and bits that say what is null
    for field in fields:
        known = (len(field.sources),) if field.packed or not field.depth else shapes.get(field.name)
        words = field.vocabulary is not None or field.buckets is not None
        if known is None or words or field.kind != "fixed" or field.pad is not None:
            return None
        total += 64 + 9 * math.prod(known) + 24 * math.prod(known[:-1])
    return total


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
