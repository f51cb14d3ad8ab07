"""The end of a stream of rows, by the protocol of PySpark's worker (driver, Spark's Python worker)."""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import Any

TRIED = ("4.2.",)  # versions of Spark with whose workers `stream_is_complete` was verified


def end_is_seen(version: str) -> bool:
    """Return whether the end of a shard is recognised without sorted rows in this version of Spark."""
    return version.startswith(TRIED) and not os.environ.get("TRITIUM_SORT")


def stream_is_complete() -> bool | None:
    """Return whether the Arrow stream that just ended was complete, by Spark's worker protocol.

    After a failed fetch the stream ends as a complete one does, but nothing follows it; after a complete one pyspark's
    `worker.main` has an end mark left to read. That is no public API: None where the worker is not as expected.
    """
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
