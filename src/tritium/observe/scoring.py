"""The progress of a scoring into a table: a bar on a terminal or in a notebook, plain lines elsewhere (driver)."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import IO, TYPE_CHECKING

from tritium.observe.live import can_be_live, terminal
from tritium.observe.position import clock_time
from tritium.observe.progress import LINE_SECONDS

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class ScoringProgress:
    """The share of the source's partitions that is scored, rows a second and the time left. Not thread-safe.

    partitions : of the source. kept : how many of them were finished before.
    title      : begins every line.
    show       : False shows nothing. live : whether to draw a bar; None: on a terminal, or in a notebook.
    """

    def __init__(
        self,
        partitions: int,
        kept: int,
        title: str,
        *,
        show: bool = True,
        live: bool | None = None,
        stream: IO[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.partitions, self.kept = partitions, kept
        self._title, self._show, self._stream, self._clock = title, show, stream, clock
        self._begun = self._last_line = clock()
        self._done, self._rows, self._rows_at = kept, 0, clock()
        self._bar: tuple[Progress, TaskID] | None = None
        if show and live is not False:
            self._start_bar(live)
        if kept:
            self._line(f"{kept:,} of {partitions:,} source partitions were scored before and are kept")

    def update(self, done: int, rows: int) -> None:
        """Show that so many partitions are done, those kept included, and that finished parts had so many rows."""
        if rows != self._rows:
            self._rows, self._rows_at = rows, self._clock()
        self._done = max(done, self._done)
        if self._bar is not None:
            bar, task = self._bar
            bar.update(task, completed=self._done, description=self.text())
        elif self._clock() - self._last_line >= LINE_SECONDS:
            self._line(self.text())

    def text(self) -> str:
        """Return the known parts of `14 of 120 partitions, 1,234 rows, 98 rows/s, 1:20 left`."""
        parts = [f"{self._done:,} of {self.partitions:,} source partitions"]
        if self._rows:
            rate = self._rows / max(self._rows_at - self._begun, 1e-3)
            parts += [f"{self._rows:,} rows", f"{rate:,.0f} rows/s"]
        if self.seconds_left is not None:
            parts.append(f"{clock_time(self.seconds_left)} left")
        return ", ".join(parts)

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the last partition at the mean speed of this run; None before the first, and at the end."""
        computed = self._done - self.kept
        if not computed or self._done >= self.partitions:
            return None
        return (self._clock() - self._begun) / computed * (self.partitions - self._done)

    def close(self, line: str = "") -> None:
        """Remove the bar, and write a last line."""
        if self._bar is not None:
            (bar, _), self._bar = self._bar, None
            try:
                bar.stop()
            finally:
                terminal.release()
        if line:
            self._line(line)

    def _line(self, text: str) -> None:
        self._last_line = self._clock()
        if not self._show:
            return
        if self._bar is not None:
            self._bar[0].console.print(f"{self._title}: {text}", highlight=False, markup=False)
            return
        stream = self._stream or sys.stdout
        try:
            stream.write(f"{self._title}: {text}\n")
            stream.flush()
        except (OSError, ValueError):  # The terminal or the stream was closed, and the scoring continues.
            self._show = False

    def _start_bar(self, forced: bool | None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        console = Console(file=self._stream, force_terminal=True if forced and self._stream else None)
        if not (forced or can_be_live(console)) or not terminal.acquire(blocking=False):
            return
        columns = (
            TextColumn(self._title, style="bold", markup=False),
            BarColumn(20),
            TextColumn("{task.description}", markup=False),
        )
        bar = Progress(*columns, console=console, transient=True)
        task = bar.add_task("starting", total=self.partitions, completed=self.kept)
        bar.start()
        self._bar = bar, task
