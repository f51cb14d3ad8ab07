"""What Spark observes of each micro-batch of a streaming query, for a function on the driver."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def on_micro_batch(spark: Any, name: str, call: Callable[[Any, Mapping[str, Any]], None]) -> None:
    """Call `call(progress, observed)` after each micro-batch with rows whose progress has the observation `name`.

    It is called in a thread of Spark's, until all queries with this observation have ended.
    """
    from pyspark.sql.streaming.listener import StreamingQueryListener

    class Listener(StreamingQueryListener):
        def __init__(self) -> None:
            self.runs: set[Any] = set()

        def onQueryStarted(self, event: Any) -> None:
            pass

        def onQueryIdle(self, event: Any) -> None:
            pass

        def onQueryProgress(self, event: Any) -> None:
            progress = event.progress
            if name in progress.observedMetrics:
                self.runs.add(progress.runId)
                if progress.numInputRows:
                    call(progress, progress.observedMetrics[name].asDict())

        def onQueryTerminated(self, event: Any) -> None:
            if event.runId in self.runs:
                self.runs.discard(event.runId)
                if not self.runs:
                    spark.streams.removeListener(self)

    spark.streams.addListener(Listener())
