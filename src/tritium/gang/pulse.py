"""Where a rank stands: its step and phase, and since when (rank).

Everything that moves a rank on passes by here: batches, logged steps, meetings, stored files, checkpoints. A heartbeat
tells the supervisor about once a second.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from tritium.errors import WireError
from tritium.wire import Channel

SECONDS = 1.0  # between two heartbeats
_STEPS = 64  # the median step is one of so many last ones
_ENOUGH = 10  # steps whose median counts

Kind = Literal["step", "wait", "rows", "other"]
"""What a phase is: between two batches; a wait for other ranks; a wait for rows; anything else."""


class Pulse:
    """The step and the phase of this rank. Methods may be called from any thread; `word` is what is told of it.

    beats : grows with everything that moves the rank on.
    taken : batches taken so far from all shards.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.beats = 0
        self.taken = 0
        self._clock = clock
        self._step: int | None = None
        self._epoch: int | None = None
        self._first: str | None = None  # the shard whose batches are "step 3"; others say their name
        self._phase: tuple[Kind, str | tuple[str, int, int], float] = ("other", "starting", clock())
        self._inside: list[tuple[Kind, str, float]] = []
        self._stepped: float | None = None  # when the batch in hand was taken
        self._steps: deque[float] = deque(maxlen=_STEPS)

    def enter(self, phase: str, kind: Kind = "other") -> None:
        """From now on the rank is in this phase, until the next one."""
        self._stepped = None
        self._phase = (kind, phase, self._clock())
        self.beats += 1

    @contextmanager
    def within(self, phase: str, kind: Kind = "other") -> Iterator[None]:
        """A phase within the present one, such as "saving a checkpoint"; it is progress to enter and to leave it."""
        entry = (kind, phase, self._clock())
        self._inside.append(entry)
        self.beats += 1
        try:
            yield
        finally:
            self._inside.remove(entry)
            self.beats += 1

    def beat(self) -> None:
        """Something moved on within the present phase."""
        self.beats += 1

    def took(self, name: str, epoch: int, step: int) -> None:
        """A batch was taken from the shard `name`: the `step`-th of the epoch, both from 0."""
        now = self._clock()
        if self._stepped is not None:
            self._steps.append(now - self._stepped)
        if self._first is None:
            self._first = name
        if name == self._first:
            self._step, self._epoch = step + 1, epoch + 1
        self._stepped = now
        self._phase = ("step", (name, epoch, step), now)
        self.taken += 1
        self.beats += 1

    def logged(self, fields: Mapping[str, Any]) -> None:
        """`world.log` was called. Its step is shown of a rank that takes no batches."""
        self.beats += 1
        if self._first is None and fields.get("step") is not None:
            self._step = int(fields["step"]) + 1
            self._epoch = int(fields["epoch"]) + 1 if fields.get("epoch") is not None else None
            self._phase = ("other", f"after {place(self._epoch, self._step)}", self._clock())

    def word(self) -> dict[str, Any]:
        """All of it as JSON: `seconds` in the phase, `pace` the median seconds of a step once there are enough."""
        inside = self._inside[-1:]
        kind, phase, since = inside[0] if inside else self._phase
        if isinstance(phase, tuple):
            name, epoch, step = phase
            phase = place(epoch + 1, step + 1) + ("" if name == self._first else f" of {name!r}")
        steps = list(self._steps)
        return {
            "step": self._step,
            "epoch": self._epoch,
            "doing": kind,
            "phase": phase,
            "seconds": round(self._clock() - since, 3),
            "beats": self.beats,
            "taken": self.taken,
            "pace": statistics.median(steps) if len(steps) >= _ENOUGH else None,
        }


def place(epoch: int | None, step: int) -> str:
    """Both counted from 1: "step 3", and from the second epoch on "epoch 2, step 3"."""
    return f"step {step}" if epoch is None or epoch <= 1 else f"epoch {epoch}, step {step}"


def start_heart(pulse: Pulse, channel: Channel) -> None:
    """Tell the supervisor how `pulse` stands, at once and then every second, from a daemon thread of its own."""
    main = threading.main_thread().ident
    rest = threading.Event()

    def beat() -> None:
        while True:
            try:
                channel.send("pulse", main=main, **pulse.word())
            except WireError:  # the supervisor is gone: the control thread ends this process
                return
            rest.wait(SECONDS)

    threading.Thread(target=beat, name="tritium-heart", daemon=True).start()
