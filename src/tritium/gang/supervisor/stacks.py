"""Read the Python stacks of a rank by a signal, and summarize them in one line (supervisor).

faulthandler answers the signal in C, so a rank answers also in an endless C call, and while the interpreter's lock is
held. It writes to a file that the supervisor made and the rank inherited.
"""

from __future__ import annotations

import os
import re
import signal
import sysconfig
import time
from dataclasses import dataclass
from typing import Any

from tritium import ship
from tritium.gang.rank.progress_page import memory_file

# SIGRTMAX - 1 where there are real-time signals: users, launchers, profilers and C libraries use the first ones.
SIGNAL = int(signal.SIGRTMAX) - 1 if hasattr(signal, "SIGRTMAX") else int(signal.SIGUSR2)
ANSWER_SECONDS = 1.5
"""The limit for a rank to write its stacks."""
_SETTLED_SECONDS = 0.1
"""The stacks are complete after this time without a further byte."""
_LOOK_SECONDS = 0.02

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')
_WRAPPERS = {"wrapper", "inner", "decorate_context", "__exit__", "__enter__"}
_COLLECTIVE = ("torch/distributed/", "horovod/", "mpi4py/", "tritium/frameworks/host_memory")
_FRAMES_SEARCHED = 8
"""The innermost frames that are searched for a collective."""


class Stacks:
    """The file that a rank writes its stacks to."""

    def __init__(self) -> None:
        self.file = memory_file("stacks")

    def ask(self, rank: Any) -> str:
        """Have `rank` (a RankProcess) write its stacks, and return them; empty after ANSWER_SECONDS without."""
        start = os.fstat(self.file.fileno()).st_size
        deadline = time.monotonic() + ANSWER_SECONDS
        rank.send_signal(SIGNAL)
        size, since = start, time.monotonic()
        while (now := time.monotonic()) < deadline and not (size > start and now - since > _SETTLED_SECONDS):
            time.sleep(_LOOK_SECONDS)
            grown = os.fstat(self.file.fileno()).st_size
            if grown != size:
                size, since = grown, time.monotonic()
        return os.pread(self.file.fileno(), size - start, start).decode("utf-8", "replace")

    def close(self) -> None:
        """Close the file, which has no name."""
        self.file.close()


@dataclass(frozen=True)
class Frame:
    """One line of a stack."""

    path: str
    line: str
    name: str

    @property
    def place(self) -> str:
        """File name and line: `train.py:42`."""
        return f"{self.path.rpartition('/')[2]}:{self.line}"


def main_thread(text: str, ident: int | None) -> list[Frame]:
    """Return the frames of the thread `ident`, or else of the one written last; innermost first."""
    threads: list[tuple[int, list[Frame]]] = []
    for line in text.splitlines():
        if match := _THREAD.match(line):
            threads.append((int(match[1], 16), []))
        elif threads and (match := _FRAME.match(line)):
            threads[-1][1].append(Frame(*match.groups()))
    chosen = [frames for number, frames in threads if number == ident] or [frames for _, frames in threads[-1:]]
    return chosen[0] if chosen else []


def where(frames: list[Frame]) -> str:
    """Describe the user's innermost frame, and what it called: `in train() at train.py:42 → all_reduce (…)`."""
    if not frames:
        return ""
    users = next((n for n, frame in enumerate(frames) if not _is_library(frame)), None)
    if users is None:  # The training loop of an estimator stands for the user's code.
        users = next((n for n, frame in enumerate(frames) if "/tritium/ml/" in frame.path), len(frames) - 1)
    text = f"in {frames[users].name}() at {frames[users].place}"
    called = [frame for frame in frames[:users] if frame.name not in _WRAPPERS]
    if not called:
        return text
    names = list(dict.fromkeys((called[-1].name, called[0].name)))
    return f"{text} → {' → '.join(names)} ({called[0].place})"


def in_collective(frames: list[Frame]) -> str:
    """Return the name of the collective that the thread is in, such as "all_reduce"; empty for none."""
    calls = [frame.name for frame in frames[:_FRAMES_SEARCHED] if any(part in frame.path for part in _COLLECTIVE)]
    return next((name for name in reversed(calls) if name not in _WRAPPERS), "")


_LIBRARIES = tuple(
    {
        os.path.join(os.path.realpath(folder), "")
        for name, folder in sysconfig.get_paths().items()
        if name in ("stdlib", "platstdlib", "purelib", "platlib")
    }
    | {os.path.join(folder, "") for name, folder in sysconfig.get_paths().items() if name in ("stdlib", "purelib")}
    | {os.path.join(ship.home(), "tritium", "")}
)


def _is_library(frame: Frame) -> bool:
    path = frame.path
    return (
        path.startswith(("<frozen", *_LIBRARIES))
        or "/site-packages/" in path
        or "/dist-packages/" in path
        or (path == "<string>" and frame.name == "<module>")
    )
