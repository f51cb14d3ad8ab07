"""The position and speed of a training, from its ranks' logs (driver)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import NamedTuple

from tritium.events import Logged

RATE_SECONDS = 15.0
"""The window over which rows/s is a mean."""
_POINTS = 200
"""Beyond twice as many losses, every other one is dropped."""


class RunState(NamedTuple):
    """What a display shows of a run: texts, and the share of the steps that is done (None: unknown)."""

    name: str
    elapsed: str
    status: str
    spooled: str
    steps: str
    fraction: float | None
    losses: str


class TrainingPosition:
    """Epoch, step and rates of a training. Not thread-safe.

    position : `epoch`, `epochs`, `step` and `steps`, as far as they were logged, of the lowest rank that logs.
    values   : the numbers that this rank logged last, by name.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._leader: int | None = None
        """The lowest rank that logs."""
        self._windows: dict[int, deque[tuple[float, int]]] = {}
        """Rank → (time, rows taken by then)."""
        self._first: tuple[float, float] | None = None
        """Time and fraction at the first log."""
        self._fraction: float | None = None
        """The fraction at the last log."""
        self._latest = 0.0
        """The time of the last log that changed the fraction."""
        self.position: dict[str, int] = {}
        self.values: dict[str, float | str] = {}
        self.losses: list[float] = []
        """The first loss of every log: of the whole training, thinned out."""

    def log(self, event: Logged) -> None:
        """Record a log of a rank."""
        now = self._clock()
        if event.rows is not None:
            window = self._windows.setdefault(event.rank, deque())
            window.append((now, event.rows))
            while window[0][0] < now - RATE_SECONDS and len(window) > 2:
                window.popleft()
        if self._leader is None or event.rank <= self._leader:
            self._leader = event.rank
            self.values.update(event.values or {})
            losses = (value for name, value in (event.values or {}).items() if "loss" in name)
            if isinstance(loss := next(losses, None), int | float):  # A text is not finite.
                self.losses.append(loss)
                if len(self.losses) > 2 * _POINTS:
                    del self.losses[1:-1:2]
            if event.epoch not in (None, self.position.get("epoch")) and event.step is None:
                self.position.pop("step", None)  # That step is of another epoch.
            keys = ("step", "steps", "epoch", "epochs")
            self.position.update({key: getattr(event, key) for key in keys if getattr(event, key) is not None})
            fraction = self.fraction
            if fraction != self._fraction:
                self._fraction, self._latest = fraction, now
            if self._first is None and fraction is not None:
                self._first = (now, fraction)

    @property
    def begun(self) -> bool:
        """Whether a rank has logged anything."""
        return self._leader is not None

    @property
    def fraction(self) -> float | None:
        """The share of all steps that is done, 0 to 1; None where the ranks don't log how many there are."""
        place = self.position
        steps, epochs = place.get("steps", 0), place.get("epochs")
        within = (place.get("step", -1) + 1) / steps if steps else None
        if not epochs:
            return None if within is None else min(within, 1.0)
        return min((place.get("epoch", 0) + (within or 0.0)) / epochs, 1.0)

    @property
    def rows_per_second(self) -> float | None:
        """Rows that all ranks together take per second; None before a rank has logged twice."""
        rates = [
            (window[-1][1] - window[0][1]) / (window[-1][0] - window[0][0])
            for window in self._windows.values()
            if window[-1][0] > window[0][0]
        ]
        return sum(rates) if rates else None

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the last step at the mean speed since the first; None where that is unknown."""
        fraction = self.fraction
        if self._first is None or fraction is None or fraction <= self._first[1]:
            return None
        left = (self._latest - self._first[0]) / (fraction - self._first[1]) * (1.0 - fraction)
        return max(0.0, left - (self._clock() - self._latest))

    def text(self) -> str:
        """Return the known parts of `epoch 2/5, step 120/300, 12,345 rows/s, loss 0.1234, 0:21 left`."""
        parts = []
        for one, many in (("epoch", "epochs"), ("step", "steps")):
            if one in self.position:
                total = self.position.get(many)
                parts.append(f"{one} {self.position[one] + 1}" + (f"/{total}" if total else ""))
        if self.rows_per_second is not None:
            parts.append(f"{self.rows_per_second:,.0f} rows/s")
        parts += [f"{name} {number(value)}" for name, value in self.values.items()]
        if self.seconds_left is not None and self.fraction != 1.0:
            parts.append(f"{clock_time(self.seconds_left)} left")
        return ", ".join(parts)


_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 20) -> str:
    """Return the course of finite numbers as bars of text, up to `width` of them: the least is the lowest bar."""
    if len(values) < 2:
        return ""
    count = min(width, len(values))
    means = [fmean(values[i * len(values) // count : (i + 1) * len(values) // count]) for i in range(count)]
    low, span = min(means), max(means) - min(means)
    return "".join(_BARS[round((mean - low) / span * (len(_BARS) - 1)) if span else 0] for mean in means)


def number(value: float | str) -> str:
    """Return four significant digits, or a string (which stands for a non-finite number) as it is."""
    return value if isinstance(value, str) else f"{value:.4g}"


def clock_time(seconds: float) -> str:
    """Return 75.2 as "1:15", 3675 as "1:01:15"."""
    minutes, whole = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{whole:02}" if hours else f"{minutes}:{whole:02}"
