"""The progress page: a rank's step and phase, in memory that its supervisor reads (rank, supervisor).

Batches, logged steps, all-gathers, stored files and checkpoints update it. Rank and supervisor map the same memory, so
an update takes about a microsecond and no thread, and the supervisor reads the exact last step of a rank that can't
answer any more (stopped, or in an endless C call).
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, Literal

from tritium.events import Logged

Doing = Literal["other", "step", "wait", "rows"]
"""The kind of a phase: any; between two batches; waiting for other ranks; waiting for rows."""

_DOING: tuple[Doing, ...] = ("other", "step", "wait", "rows")
_PHASE_BYTES = 160
# Changes, step, epoch, taken, logged, since, main thread, doing, phase, and changes again to detect a torn read.
_PAGE = struct.Struct(f"=QqqQQdQB{_PHASE_BYTES}sQ")
_NONE = -1
_TRIES = 5


class ProgressWriter:
    """Writes the step and phase of this rank. Methods may be called from any thread."""

    def __init__(self, page: mmap.mmap | None = None) -> None:
        self._page = page
        self._changes = 0
        self._batches_taken = 0
        self._steps_logged = 0
        self._step = self._epoch = _NONE  # Both count from 1.
        self._step_shard: str | None = None  # Only batches of the first shard are steps.
        self._phase: tuple[Doing, bytes, float] = ("other", b"starting", time.monotonic())
        self._inside: list[tuple[Doing, bytes, float]] = []
        self._main = threading.main_thread().ident or 0
        self.touch()

    @classmethod
    def on(cls, fd: int) -> ProgressWriter:
        """Return a writer to the ProgressPage with this file descriptor."""
        return cls(mmap.mmap(fd, _PAGE.size))

    def enter(self, phase: str, doing: Doing = "other") -> None:
        """Enter a phase, until the next one."""
        self._phase = (doing, phase.encode()[:_PHASE_BYTES], time.monotonic())
        self.touch()

    @contextmanager
    def within(self, phase: str, doing: Doing = "other") -> Iterator[None]:
        """Be in a phase within the current one, such as "saving a checkpoint". Entering and leaving are progress."""
        entry = (doing, phase.encode()[:_PHASE_BYTES], time.monotonic())
        self._inside.append(entry)
        self.touch()
        try:
            yield
        finally:
            self._inside.remove(entry)
            self.touch()

    def took(self, name: str, epoch: int, step: int) -> None:
        """Record that batch `step` of `epoch` (both from 0) was taken from the shard `name`."""
        if self._step_shard is None:
            self._step_shard = name
        text = place(epoch + 1, step + 1)
        if name == self._step_shard:
            self._step, self._epoch = step + 1, epoch + 1
        else:
            text = f"{text} of {name!r}"
        self._phase = ("step", text.encode()[:_PHASE_BYTES], time.monotonic())
        self._batches_taken += 1
        self.touch()

    def on_logged(self, event: Logged) -> None:
        """Record a call of `world.log`. Its step counts as the rank's where it takes no batches."""
        if self._step_shard is None and event.step is not None:
            self._step = event.step + 1
            self._epoch = _NONE if event.epoch is None else event.epoch + 1
            text = f"after {place(self._epoch, self._step)}"
            self._phase = ("other", text.encode(), time.monotonic())
            self._steps_logged += 1
        self.touch()

    def touch(self) -> None:
        """Record progress: write the page with a new number of changes."""
        self._changes += 1
        if self._page is not None:
            doing, phase, since = next(iter(self._inside[-1:]), self._phase)
            number = _DOING.index(doing)
            _PAGE.pack_into(
                self._page,
                0,
                self._changes,
                self._step,
                self._epoch,
                self._batches_taken,
                self._steps_logged,
                since,
                self._main,
                number,
                phase,
                self._changes,
            )


def place(epoch: int, step: int) -> str:
    """Format step and epoch, both from 1: "step 3", and from the second epoch on "epoch 2, step 3"."""
    return f"step {step}" if epoch <= 1 else f"epoch {epoch}, step {step}"


def memory_file(name: str) -> IO[bytes]:
    """Return a file in memory, which works with a full or hanging disk; a temporary one where Python has none.

    That is so on other systems than Linux, and in Pythons that are built for an old C library: Conda's, and some of uv.
    """
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create(f"tritium-{name}"), "w+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


class ProgressPage:
    """The progress page, at the supervisor's end."""

    def __init__(self) -> None:
        self._file = memory_file("progress")
        os.ftruncate(self._file.fileno(), _PAGE.size)
        self._map = mmap.mmap(self._file.fileno(), _PAGE.size)

    @property
    def fd(self) -> int:
        """The file descriptor, for the rank to inherit."""
        return self._file.fileno()

    def read(self) -> dict[str, Any]:
        """Return the page. `changes` is 0 before the rank's first update; `since` is a monotonic time."""
        for _ in range(_TRIES):
            changes, step, epoch, taken, logged, since, main, doing, phase, again = _PAGE.unpack_from(self._map)
            if changes == again:
                break
        if not changes:
            first = {"changes": 0, "doing": "other", "phase": "starting Python"}
            return {**first, "since": None, "main": None, "taken": 0, "logged": 0}
        return {
            "changes": changes,
            "step": None if step == _NONE else step,
            "epoch": None if epoch == _NONE else epoch,
            "taken": taken,
            "logged": logged,
            "since": since,
            "main": main,
            "doing": _DOING[doing],
            "phase": phase.rstrip(b"\0").decode("utf-8", "replace"),
        }

    def close(self) -> None:
        """Close the page, which has no name."""
        self._map.close()
        self._file.close()
