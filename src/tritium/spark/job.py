"""Work of Spark's in a thread of its own, under a tag by which it alone is cancelled (driver)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from tritium.spark.session import Session

T = TypeVar("T")


class TaggedJob(Generic[T]):
    """A function that runs Spark jobs. Its thread sets `result` or `problem`, then `ended`, and notifies `changed`.

    It does so whatever happens to the JVM.
    """

    def __init__(
        self,
        session: Session,
        tag: str,
        description: str,
        work: Callable[[], T],
        changed: threading.Condition | None = None,
    ) -> None:
        self.session = session
        self.tag = tag
        self.ended = False
        self.result: T | None = None
        self.problem: BaseException | None = None
        self._description = description
        self._work = work
        self._changed = changed or threading.Condition()
        self._thread = session.thread(self.run, tag)

    def start(self) -> None:
        """Begin, in a thread that inherits the user's job group and pool."""
        self._thread.start()

    def run(self) -> None:
        """Do the work in this thread."""
        try:
            self.session.tag(self.tag, self._description)
            self.result = self._work()
        except BaseException as error:  # noqa: BLE001 - a thread has no one above it; who waits for the job raises this
            self.problem = self.translated(error)
        finally:
            with self._changed:
                self.ended = True
                self._changed.notify_all()

    def translated(self, error: BaseException) -> BaseException:
        """Return the error for one that the work has raised."""
        return error

    def is_this_thread(self) -> bool:
        """Tell whether the caller is in the job's own thread."""
        return threading.current_thread() is self._thread

    def cancel(self, reason: str) -> None:
        """Cancel this job alone. `reason` is shown in Spark's UI and log."""
        self.session.cancel(self.tag, reason)

    def join(self, seconds: float = 10.0) -> None:
        """Wait for the end of the job, up to `seconds`."""
        self._thread.join(seconds)
