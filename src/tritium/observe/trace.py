"""A measurement of the parts of the time of a rank's steps (rank).

The time from the first batch asked for to the end of the last epoch is divided into sections; of nested sections the
innermost counts.
"""

from __future__ import annotations

import re
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol, TypeVar

Section = Literal[
    "wait for data", "copy to device", "forward", "backward", "communicate", "optimizer", "rows to arrive"
]

SECTIONS = ("wait for data", "copy to device", "forward", "backward", "communicate", "optimizer", "other")
SPANS = ("step", *SECTIONS[:-1], "rows to arrive")
"""What a span of the timeline may be; spans have the numbers of these."""
SPAN_NUMBERS = 4
"""A span is so many doubles: its number in SPANS, start and end in seconds of the rank's clock, number of the step."""
_NUMBER_OF = {name: float(number) for number, name in enumerate(SPANS)}
_AT_ONCE, _FLUSH_SECONDS = 4096, 2.0
"""So many spans, or those of so many seconds, are sent at once."""
_AT_FULL = 20_000
"""So many spans are recorded of every step, as many more of every second one, then of every fourth, and so on."""
_PROFILED = re.compile(r"torch(?::(\d{1,9})-(\d{1,9}))?")
_FIRST, _LAST = 5, 9
"""The steps that are profiled by default: the first ones allocate memory, choose kernels and connect."""
T = TypeVar("T")


def profiled(trace: bool | str) -> range:
    """Return the steps that `trace="torch"` or `trace="torch:100-104"` profiles; none for any other value."""
    match = _PROFILED.fullmatch(trace) if isinstance(trace, str) else None
    return range(0) if match is None else range(int(match[1] or _FIRST), int(match[2] or _LAST) + 1)


class Profiler(Protocol):
    """A profiler of chosen steps."""

    def on_step(self, step: int | None) -> None:
        """Take the number of the step that begins; None: an epoch has ended."""

    def on_returned(self) -> None:
        """Take that the function has returned."""


class Trace:
    """The time of one rank's steps by section. Only the thread that takes the batches is measured.

    clock : returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._spent: dict[str, float] = {}
        self.inside: list[Section] = []
        """The sections that the thread is in, the innermost one last."""
        self._thread: int | None = None
        self._begun = self._mark = self._ended = 0.0
        self._steps = 0
        self._kept: dict[str, float] = {}
        self._epoch = time.time() - clock()
        """What makes a time of day of the clock's."""
        self._spans = array("d")
        self._recorded, self._every, self._records = 0, 1, False
        self._step_begun = self._flushed = 0.0
        self.on_spans: Callable[..., object] | None = None
        """Takes spans for the timeline, as `on_spans(doubles as bytes, epoch=seconds)`: the time of day at 0.0."""
        self.synchronize: Callable[[], object] = _nothing
        """Waits for the device, so that what runs there is counted in the section that started it."""
        self.on_first_batch: Callable[[], object] = _nothing
        """Called before the first batch, when the framework to hook into has been imported."""
        self.waited_in_backward: Callable[[], float] = float
        """Returns the seconds of "backward" in which the rank only waited for the exchange of gradients."""
        self.profiler: Profiler | None = None

    def batches(self, batches: Iterator[T]) -> Iterator[T]:
        """Yield the same batches; each counts as a step."""
        if self._thread is None:
            self.on_first_batch()
            self._thread = threading.get_ident()
            self._begun = self._mark = self._flushed = self._clock()
        while True:
            self._next_step()
            try:
                with self.within("wait for data"):
                    batch = next(batches)
            except StopIteration:
                self._tell_profiler(None)
                self._ended, self._kept = self._clock(), dict(self._spent)
                self._records = False  # This was no step: there was no further batch.
                self.flush()
                return
            self._steps += 1
            yield batch

    @contextmanager
    def within(self, section: Section) -> Iterator[None]:
        """Attribute the block's time to this section."""
        self.enter(section)
        try:
            yield
        finally:
            self.leave(section)

    def enter(self, section: Section) -> None:
        """Attribute time to this section until `leave`."""
        if threading.get_ident() != self._thread:
            return
        if not self.inside or self.inside[-1] != section:
            self._account()
        self.inside.append(section)

    def leave(self, section: Section) -> None:
        """Return to the previous section. Also leaves sections entered within, which an exception left open."""
        if threading.get_ident() != self._thread or section not in self.inside:
            return
        if self.inside[-2:] != [section, section]:
            self._account()
        while self.inside.pop() != section:
            pass

    def _account(self) -> None:
        self.synchronize()
        now = self._clock()
        if self.inside:
            self._spent[self.inside[-1]] = self._spent.get(self.inside[-1], 0.0) + now - self._mark
            if self._records:
                self._spans.extend((_NUMBER_OF[self.inside[-1]], self._mark, now, self._steps))
        self._mark = now

    def _next_step(self) -> None:
        """Record the step that ends as the next batch is asked for, and decide whether to record the next one."""
        if self.on_spans is None or threading.get_ident() != self._thread:
            return
        now = self._clock()
        if self._records:
            self._spans.extend((0.0, self._step_begun, now, self._steps - 1))
        if len(self._spans) >= _AT_ONCE * SPAN_NUMBERS or (self._spans and now - self._flushed >= _FLUSH_SECONDS):
            self.flush()
        self._tell_profiler(self._steps)
        self._step_begun, self._records = self._clock(), self._steps % self._every == 0

    def _tell_profiler(self, step: int | None) -> None:
        """Let a profiler begin or end, which takes up to seconds; they are no step's."""
        if self.profiler is not None and threading.get_ident() == self._thread:
            begun = self._clock()
            self.profiler.on_step(step)
            self._begun += self._clock() - begun

    def flush(self) -> None:
        """Send the spans that are recorded and not sent. May be called when the function has failed, too."""
        if self.on_spans is None or not self._spans:
            return
        spans, self._spans, self._flushed = self._spans, array("d"), self._clock()
        self._recorded += len(spans) // SPAN_NUMBERS
        while self._recorded >= _AT_FULL:
            self._recorded, self._every = self._recorded - _AT_FULL, self._every * 2
        self.on_spans(spans.tobytes(), epoch=self._epoch)

    def report(self) -> dict[str, Any] | None:
        """Return `steps`, `seconds` by section in the order of SECTIONS, and `arrive`, as JSON.

        `arrive` are those seconds of "wait for data" in which rows had not yet arrived. None is returned where no epoch
        was taken to its end.
        """
        if not self._ended:
            return None
        spent = dict(self._kept)
        arrive = spent.pop("rows to arrive", 0.0)
        waited = min(self.waited_in_backward(), spent.get("backward", 0.0))
        spent["wait for data"] = spent.get("wait for data", 0.0) + arrive
        spent["backward"] = spent.get("backward", 0.0) - waited
        spent["communicate"] = spent.get("communicate", 0.0) + waited
        spent["other"] = max(0.0, self._ended - self._begun - sum(spent.values()))
        seconds = {name: round(spent.get(name, 0.0), 4) for name in SECTIONS}
        return {"steps": self._steps, "seconds": seconds, "arrive": round(arrive, 4)}


def _nothing() -> None:
    pass
