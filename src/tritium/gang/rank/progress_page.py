"""Where a rank stands: its step and phase, and since when (rank, supervisor).

Everything that moves a rank on passes by here: batches, logged steps, all-gathers, stored files, checkpoints. It is
written to one page of memory that the supervisor maps too: to tell costs about a microsecond and no thread, and the
supervisor reads the very last step of a rank that can't say a word any more (stopped, or in an endless C call).
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any, Literal

Doing = Literal["other", "step", "wait", "rows"]
"""What a phase is: anything; between two batches; a wait for other ranks; a wait for rows."""

_DOING: tuple[Doing, ...] = ("other", "step", "wait", "rows")
_TEXT = 160  # bytes of the phase's name
# changes, step, epoch, taken, logged, since, main thread, doing, phase, and changes again: a page being written differs
_PAGE = struct.Struct(f"=QqqQQdQB{_TEXT}sQ")
_NONE = -1
_TRIES = 5


class ProgressWriter:
    """The step and the phase of this rank. Methods may be called from any thread."""

    def __init__(self, page: mmap.mmap | None = None) -> None:
        self._page = page
        self._changes = 0
        self._taken = 0  # batches, from all shards
        self._logged = 0  # steps
        self._step = self._epoch = _NONE  # from 1
        self._first: str | None = None  # the shard whose batches are "step 3"; the others' say their name
        self._phase: tuple[Doing, bytes, float] = ("other", b"starting", time.monotonic())
        self._inside: list[tuple[Doing, bytes, float]] = []
        self._main = threading.main_thread().ident or 0
        self.touch()

    @classmethod
    def on(cls, fd: int) -> ProgressWriter:
        """A writer whose other end is the ProgressPage with this descriptor."""
        return cls(mmap.mmap(fd, _PAGE.size))

    def enter(self, phase: str, doing: Doing = "other") -> None:
        """From now on the rank is in this phase, until the next one."""
        self._phase = (doing, phase.encode()[:_TEXT], time.monotonic())
        self.touch()

    @contextmanager
    def within(self, phase: str, doing: Doing = "other") -> Iterator[None]:
        """A phase within the present one, such as "saving a checkpoint"; to enter it and to leave it is progress."""
        entry = (doing, phase.encode()[:_TEXT], time.monotonic())
        self._inside.append(entry)
        self.touch()
        try:
            yield
        finally:
            self._inside.remove(entry)
            self.touch()

    def took(self, name: str, epoch: int, step: int) -> None:
        """A batch was taken from the shard `name`: the `step`-th of the epoch, both from 0."""
        if self._first is None:
            self._first = name
        text = place(epoch + 1, step + 1)
        if name == self._first:
            self._step, self._epoch = step + 1, epoch + 1
        else:
            text = f"{text} of {name!r}"
        self._phase = ("step", text.encode()[:_TEXT], time.monotonic())
        self._taken += 1
        self.touch()

    def logged(self, fields: Mapping[str, Any]) -> None:
        """`world.log` was called. Its step is taken for a rank's own where it takes no batches."""
        if self._first is None and fields.get("step") is not None:
            self._step = int(fields["step"]) + 1
            self._epoch = int(fields["epoch"]) + 1 if fields.get("epoch") is not None else _NONE
            text = f"after {place(self._epoch, self._step)}"
            self._phase = ("other", text.encode(), time.monotonic())
            self._logged += 1
        self.touch()

    def touch(self) -> None:
        """Something has moved on."""
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
                self._taken,
                self._logged,
                since,
                self._main,
                number,
                phase,
                self._changes,
            )


def place(epoch: int, step: int) -> str:
    """Both counted from 1: "step 3", and from the second epoch on "epoch 2, step 3"."""
    return f"step {step}" if epoch <= 1 else f"epoch {epoch}, step {step}"


def memory_file(name: str) -> IO[bytes]:
    """A file in memory, where there is such a thing: it works on a host whose disk is full, or does not answer."""
    if sys.platform == "linux":
        return os.fdopen(os.memfd_create(f"tritium-{name}"), "w+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


class ProgressPage:
    """The page, at the supervisor's end."""

    def __init__(self) -> None:
        self._file = memory_file("progress")
        os.ftruncate(self._file.fileno(), _PAGE.size)
        self._map = mmap.mmap(self._file.fileno(), _PAGE.size)

    @property
    def fd(self) -> int:
        """For the rank to inherit."""
        return self._file.fileno()

    def read(self) -> dict[str, Any]:
        """As it stands; `changes` is 0 before the rank's first word, `since` a time of the monotonic clock."""
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
        """The page has no name, and is gone."""
        self._map.close()
        self._file.close()
