"""The run directory of a streaming query that scores, for who watches it (driver)."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator

from tritium.errors import BadSetting
from tritium.events import Event, Note, RunEnded, stamped
from tritium.model.signature import Signature
from tritium.observe.page import RunPage
from tritium.observe.report import Report
from tritium.observe.run_directory import RunLog, new_run_dir
from tritium.spark.errors import first_line, python_error

EVENTS_BYTES = 8 << 20
"""The bytes of events in each of two files: a query may run for months."""
_log = logging.getLogger("tritium")


class QueryRun:
    """Writes what happens to the queries of one streaming DataFrame. Methods may be called from any thread.

    The directory is written from the first micro-batch, version or error on, until all of the queries have ended.

    run_dir : a local directory, which events of earlier queries may be in: new ones are appended.
    metrics : the name of the observation; "": that of the directory.

    Raises BadSetting where it can't be used.
    """

    def __init__(self, run_dir: str, metrics: str, signature: Signature) -> None:
        self._run_id, self.run_dir = new_run_dir(_made(run_dir))
        self.metrics = metrics or os.path.basename(run_dir.rstrip("/"))
        self._settings = {"run_id": self._run_id, "run_dir": self.run_dir, "query": self.metrics}
        self._model = signature.described()
        self._lock = threading.Lock()
        self._begun = time.monotonic()
        self._opened: tuple[RunLog, Report, RunPage] | None = None

    def event(self, event: Event) -> None:
        """Record an event. A directory that can't be written is warned of, and the query goes on."""
        with self._lock, self._warned():
            events = [event] if self._opened else [self._model, event]
            log, report, page = self._open()
            for entry in (stamped(entry, self._run_id) for entry in events):
                for record in (log.event, report.event, page.add):
                    record(entry)

    def ended(self, exception: str | None) -> None:
        """Record the end of the queries, with the text of Spark's exception, or None."""
        if exception is not None:
            error = python_error(exception) or first_line(exception)
            self.event(Note(text=f"the query failed: {error}\n{exception}"))
        self.event(RunEnded(ok=exception is None, seconds=round(time.monotonic() - self._begun, 3)))
        with self._lock, self._warned():
            log, report, page = self._open()
            if exception is not None:
                facts = {"how": "error", "type": "The query failed", "text": error, "traceback": exception}
                report.failed_by(error, rank=None, **facts)
            built = report.build()
            log.report(built, page.document(built))
            log.close()
            self._opened = None

    def _open(self) -> tuple[RunLog, Report, RunPage]:
        if self._opened is None:
            log = RunLog(self.run_dir, self._settings, events_bytes=EVENTS_BYTES)
            self._opened = log, Report(self._run_id, self.run_dir, self._settings), RunPage()
        return self._opened

    @contextlib.contextmanager
    def _warned(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            _log.warning("The run directory %s of a query can't be written: %s", self.run_dir, error)


def _made(run_dir: str) -> str:
    """Make the directory, and return it. Raises BadSetting."""
    if "://" in run_dir:
        raise BadSetting(
            f"run_dir={run_dir!r} of a stream must be a local directory: a store can't be appended to.",
            setting="run_dir",
        )
    try:
        os.makedirs(run_dir, exist_ok=True)
    except OSError as error:
        raise BadSetting(f"run_dir={run_dir!r} of a stream can't be made: {error}.", setting="run_dir") from error
    return run_dir
