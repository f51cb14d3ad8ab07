"""What Spark observes of each micro-batch of a streaming query, for a function on the driver."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from tritium.spark import is_connect


def on_micro_batch(
    spark: Any,
    name: str,
    call: Callable[[Any, Mapping[str, Any]], None],
    ended: Callable[[str | None], None] = lambda _: None,
    column: str = "",
) -> None:
    """Call `call(progress, observed)` after each micro-batch with rows whose progress has the observation `name`.

    It is called in a thread of Spark's, until all queries with this observation have ended.

    ended  : called then, with the text of the last one's exception, or None.
    column : a name that no other query's plan has. By it a query is known that fails before its first progress.
    """
    from pyspark.sql.streaming.listener import StreamingQueryListener

    class Listener(StreamingQueryListener):
        def __init__(self) -> None:
            self.runs: set[Any] = set()
            self.ended = False
            self.started: dict[Any, Any] = {}
            """Run → query of those that may be ours: they have made no progress yet."""

        def onQueryStarted(self, event: Any) -> None:
            if column and (query := spark.streams.get(str(event.id))) is not None:
                self.started[event.runId] = query

        def onQueryIdle(self, event: Any) -> None:
            pass

        def onQueryProgress(self, event: Any) -> None:
            progress = event.progress
            self.started.pop(progress.runId, None)
            if name in progress.observedMetrics:
                self.runs.add(progress.runId)
                if progress.numInputRows:
                    call(progress, progress.observedMetrics[name].asDict())

        def onQueryTerminated(self, event: Any) -> None:
            query = self.started.pop(event.runId, None)
            if query is not None and event.exception and column in _plan(query):
                self.runs.add(event.runId)
            if event.runId in self.runs:
                self.runs.discard(event.runId)
                if not self.runs:
                    self.ended = True
                    ended(event.exception)
            if self.ended and not self.runs:
                _remove(spark, self)

    spark.streams.addListener(Listener())


def _remove(spark: Any, listener: Any) -> None:
    if not is_connect(spark):
        spark.streams.removeListener(listener)
    elif not spark.streams.active:  # Its client waits in there for this thread, which events of others would block.
        listener.ended = False  # It is removed once.
        threading.Thread(target=spark.streams.removeListener, args=(listener,), daemon=True).start()


def _plan(query: Any) -> str:
    """Return the text of a failed query's exception, which has its plan; "" where the session has ended, too."""
    from pyspark.errors import PySparkException

    try:
        return str(query.exception())
    except PySparkException:
        return ""
