"""The progress of a run: a live display on a terminal or in a notebook, plain lines elsewhere (driver)."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import IO, Literal

from tritium.events import (
    Event,
    GangFailed,
    GangFormed,
    GangRetried,
    GangStarted,
    Logged,
    Note,
    RankReported,
    RowsCounted,
    RunEnded,
    Waiting,
)
from tritium.observe.live import LiveDisplay, started
from tritium.observe.position import RunState, TrainingPosition, clock_time, sparkline

LINE_SECONDS = 5.0
"""The least time between two plain lines of rows and steps."""
_LONGEST_LINE = 32 << 10
_BAR_SECONDS = 0.2
"""The time between two times that Spark draws its progress bar."""
_WIPE = f"\r{' ' * 80}\r"  # Spark removes the bar so, too, without a terminal's codes.


class Progress:
    """The display of a run's events and output. Methods may be called from any thread. `close` ends its thread.

    ranks  : the number of ranks; an attempt with fewer or more says so in its events.
    output : the ranks whose output is shown.
    show   : False shows only that output.
    title  : tells one of several runs from the others; every line of its own begins with it.
    live   : whether to draw a live display. None: on a terminal, or in a notebook.
    stream : the stream to write to. None: `sys.stdout`, looked up for each line.
    details: returns HTML for a notebook below the bar: curves and ranks.
    """

    def __init__(
        self,
        ranks: int,
        *,
        output: Literal["all", "rank 0", "none"] = "all",
        show: bool = True,
        title: str = "",
        live: bool | None = None,
        stream: IO[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
        details: Callable[[], str] = str,
    ) -> None:
        self.ranks = ranks
        self._output = output
        self._show = show
        self._name = f"tritium {title}".rstrip()
        self._stream = stream
        self._clock = clock
        self._begun = clock()
        self._lock = threading.Lock()  # For the state. It is never held while writing.
        self._writing = threading.Lock()
        self._partial: dict[int, str] = {}
        self._phase = f"starting {ranks} rank{'s' * (ranks > 1)}"
        self._reported = 0
        self._rows: dict[str, dict[int, int]] = {}
        self._position = TrainingPosition(clock)
        self._ended: set[tuple[str, int]] = set()
        self._last_line = clock()
        self._pending = False
        self._broken = False
        self._beside_bar = False
        """Whether Spark draws its progress bar on stderr."""
        self._written = clock()
        self._closed = False
        self._live: LiveDisplay | None = None
        if show and live is not False:
            try:
                self._live = started(self._state, details, live, stream)
            except (OSError, ValueError):  # The terminal is gone, as in `_write`.
                self._broken = True

    def event(self, event: Event) -> None:
        """Show one event of the run; kinds that the display does not use are ignored."""
        handler = getattr(self, f"_on_{event.kind}", None) if self._show else None
        with self._lock:
            lines = self._forget_attempt() if isinstance(event, GangStarted | GangRetried) else []
            if handler is not None:
                lines += [f"{self._name}: {line}" for line in handler(event) or ()]
        for line in lines:
            self._write(line)

    def output(self, rank: int, text: str) -> None:
        """Show output of a rank, as whole lines with `[rank 0]` in front."""
        if self._output == "none" or (self._output == "rank 0" and rank != 0):
            return
        with self._lock:
            lines = self._whole_lines(rank, text)
        for line in lines:
            self._write(f"[rank {rank}] {line}")

    def close(self) -> None:
        """Write what is pending, and stop the live display. May be called twice."""
        if self._closed:
            return
        self._closed = True
        if self._live is not None:
            self._live.stop_drawing()
        with self._lock:
            rest = self._unfinished()
            if self._pending:
                rest.append(f"{self._name}: {self._summary()}")
        for line in rest:
            self._write(line)
        if self._live is not None:
            display, self._live = self._live, None
            display.close()
            self._broken = self._broken or display.broken

    # ---- Events: each handler returns the lines to write

    def _on_started(self, event: GangStarted) -> list[str]:
        self._beside_bar = event.bar
        self.ranks = event.ranks
        self._phase = f"starting {self.ranks} rank{'s' * (self.ranks > 1)}"
        if event.slots is not None:
            self._phase += f" on {event.slots} slot{'s' * (event.slots != 1)}"
        return self._unless_live(self._phase)

    def _forget_attempt(self) -> list[str]:
        """Forget rows, position and rates of the attempt before, and return the lines that its ranks left unfinished.

        Another attempt reads its rows from the start.
        """
        self._reported = 0
        self._rows.clear()
        self._ended.clear()
        self._position = TrainingPosition(self._clock)
        self._pending = False
        return self._unfinished()

    def _on_reported(self, event: RankReported) -> None:
        self._reported += 1

    def _on_formed(self, event: GangFormed) -> list[str]:
        self.ranks = len(event.peers)
        hosts = list(dict.fromkeys(str(peer["host"]) for peer in event.peers))
        names = ", ".join(hosts[:4]) + (", …" if len(hosts) > 4 else "")
        kinds = Counter(str(d["name"]) for peer in event.peers for d in peer.get("devices", ()) if d.get("name"))
        devices = ", ".join(f"{count} x {name}" for name, count in kinds.items())
        self._phase = f"{self.ranks} rank{'s' * (self.ranks > 1)} on {names}" + f" with {devices}" * bool(kinds)
        return self._unless_live(f"{self._phase} after {self._elapsed():.1f} s")

    def _on_rows(self, event: RowsCounted) -> list[str]:
        self._rows.setdefault(event.name, {})[event.rank] = event.rows
        if event.ended:
            self._ended.add((event.name, event.rank))
            if all((known, k) in self._ended for known in self._rows for k in range(self.ranks)):
                return self._unless_live(f"{self._spooled()} after {self._elapsed():.1f} s")
        return [] if self._position.begun else self._summary_when_due()

    def _on_log(self, event: Logged) -> list[str]:
        if not self._position.begun:
            self._last_line = -LINE_SECONDS  # The first numbers are shown at once.
        self._position.log(event)
        return self._summary_when_due()

    def _on_failed(self, event: GangFailed) -> list[str]:
        if event.how in ("stalled", "returned"):
            self._phase = event.text.split("\n")[0]
            return self._unless_live(self._phase)
        if event.how == "exit":
            fault = f"left: {event.text}" if event.text else f"left with exit code {event.exit_code}"
        elif event.signal:
            fault = f"was killed by {event.signal}"
        else:
            fault = f"failed: {event.type}: {event.text}" if event.type else f"failed: {event.text}"
        self._phase = f"rank {event.rank} on {event.host} {fault}".split("\n")[0]
        return self._unless_live(self._phase)

    def _on_ended(self, event: RunEnded) -> list[str]:
        lines = [self._summary()] if self._pending else []
        self._phase = f"{'done' if event.ok else 'ended without a result'} after {event.seconds:.1f} s"
        return self._unless_live(*lines, self._phase)

    def _on_note(self, event: Note | Waiting) -> list[str]:
        return [event.text]

    _on_waiting = _on_note

    def _unless_live(self, *lines: str) -> list[str]:
        """Return the lines, or none where a live display shows them anyway."""
        self._pending = False
        return [] if self._live is not None else list(lines)

    def _summary_when_due(self) -> list[str]:
        """Return the summary, but at most once in LINE_SECONDS."""
        if self._live is not None:
            return []
        self._pending = self._clock() - self._last_line < LINE_SECONDS
        if self._pending:
            return []
        self._last_line = self._clock()
        return [self._summary()]

    def _summary(self) -> str:
        return self._position.text() if self._position.begun else self._spooled()

    def _spooled(self) -> str:
        totals = [f"{sum(by_rank.values()):,} rows of {name!r}" for name, by_rank in self._rows.items()]
        return "spooled " + ", ".join(totals) if totals else ""

    def _elapsed(self) -> float:
        return self._clock() - self._begun

    # ---- Lines

    def _unfinished(self) -> list[str]:
        """Return the incomplete last line of every rank that has one, and forget them."""
        rest = [f"[rank {rank}] {text}" for rank, text in sorted(self._partial.items()) if text]
        self._partial.clear()
        return rest

    def _whole_lines(self, rank: int, text: str) -> list[str]:
        text = self._partial.pop(rank, "") + text
        *lines, rest = text.split("\n")
        if len(rest) > _LONGEST_LINE:
            rest = rest.rpartition("\r")[2]  # A progress bar redraws one line.
        if len(rest) > _LONGEST_LINE:
            lines, rest = [*lines, rest], ""
        self._partial[rank] = rest
        return [line.rstrip("\r").rpartition("\r")[2] for line in lines]

    def _write(self, line: str) -> None:
        with self._writing:
            if self._broken or (self._live is not None and self._live.broken):
                return
            try:
                if self._live is not None and self._live.write(line):
                    return
                stream = self._stream or sys.stdout
                encoding = getattr(stream, "encoding", None) or "utf-8"
                before = _WIPE if self._may_follow_bar(stream) else ""
                stream.write(before + line.encode(encoding, "backslashreplace").decode(encoding) + "\n")
                stream.flush()
            except (OSError, ValueError):  # The terminal or the stream was closed, and the run continues.
                self._broken = True

    def _may_follow_bar(self, stream: IO[str]) -> bool:
        """Whether Spark's progress bar, which ends without a new line, may be on the line to be written."""
        then, self._written = self._written, self._clock()
        if not self._beside_bar or self._written - then < _BAR_SECONDS:
            return False
        try:
            return os.path.sameopenfile(stream.fileno(), 2)
        except (AttributeError, OSError, ValueError):  # It is no file, such as a notebook's, or it is closed.
            return False

    def _state(self) -> RunState:
        """Return what a live display shows."""
        with self._lock:
            status, steps = self._phase, self._position.text()
            if not self._rows and not steps and self._reported:
                status += f", {min(self._reported, self.ranks)} of {self.ranks} reported"
            elapsed, losses = clock_time(self._elapsed()), sparkline(self._position.losses)
            return RunState(self._name, elapsed, status, self._spooled(), steps, self._position.fraction, losses)
