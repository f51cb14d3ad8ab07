"""The end of a rank's rows, by the protocol of PySpark's worker (driver, Spark's Python worker).

After a failed fetch the stream of rows ends as a complete one does, but nothing follows it; after a complete one
pyspark's `worker.main` has an end mark left to read. Without that knowledge Spark sorts the rows of each rank, and the
last row proves the end. Decision 012.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from tritium.spark.inside import Inside

TRIED = ("4.2.",)  # Versions of Spark with whose workers `stream_is_complete` was verified.


def probe(spark: Any) -> str | None:
    """Return why the end of rows is not seen by the protocol of this Spark; None where it is."""
    return None if spark.version.startswith(TRIED) else f"not tried with the workers of Spark {spark.version}"


used = Inside("end_of_stream", probe, needs_jvm=False)


def stream_is_complete() -> bool | None:
    """Return whether the Arrow stream that just ended was complete; None where the worker is not as expected."""
    for frame in sys._current_frames().values():
        infile = _worker_input(frame)
        if infile is not None:
            try:
                return bool(infile.peek(1))
            except (OSError, ValueError):
                return False
            except AttributeError:
                return None
    return None


def _worker_input(frame: FrameType | None) -> Any:
    while frame is not None:
        if frame.f_code.co_name == "main" and frame.f_code.co_filename.endswith("worker.py"):
            infile = frame.f_locals.get("infile")
            if infile is not None:
                return infile
        frame = frame.f_back
    return None
