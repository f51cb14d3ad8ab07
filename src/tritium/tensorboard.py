"""TensorBoard: the numbers of runs as its event files, written without TensorFlow or TensorBoard (driver)."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import IO

from tritium.errors import BadSetting
from tritium.events import Event, Logged, RunEnded, RunOpened
from tritium.observe.stream import listen
from tritium.observe.whole_steps import WholeSteps

__all__ = ["tracked"]

_CASTAGNOLI = 0x82F63B78
_MASK = 0xA282EAD8


@contextmanager
def tracked(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Write the numbers of each run that is started within the block for TensorBoard, to a folder of its own.

        with tritium.tensorboard.tracked("board"):
            model = TorchEstimator(…).fit(df)

    `tensorboard --logdir board` shows them, while the run goes on, too. Written are the scalars and histograms that
    rank 0 gives to `world.log`, as estimators do their scalars, by the step of the whole training or else by epoch.

    folder : a local directory, which is made. A run's own in it has the run's id.

    Raises BadSetting for a URL. An error of the disk does not end a run, and is said once.
    """
    place = os.fspath(folder)
    if "://" in place:
        raise BadSetting(
            f"tritium.tensorboard.tracked({place!r}) writes to a local directory, as event files are appended to. Copy "
            "it when the run has ended.",
            setting="folder",
        )
    writer = _Writer(place)
    try:
        with listen(writer.on_event):
            yield
    finally:
        writer.close()


class _Writer:
    """The callback of `tr.listen`: an open event file for each run that goes on."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._files: dict[str, IO[bytes]] = {}
        self._steps = WholeSteps()

    def on_event(self, event: Event) -> None:
        if isinstance(event, RunOpened):
            self._open(event.run)
        elif isinstance(event, Logged) and event.rank == 0 and event.run in self._files:
            self._log(event, self._files[event.run])
        elif isinstance(event, RunEnded) and event.run in self._files:
            self._files.pop(event.run).close()
            self._steps.forget(event.run)

    def _log(self, event: Logged, file: IO[bytes]) -> None:
        numbers = {name: _scalar(float(number)) for name, number in (event.values or {}).items()}
        histograms = {name: _histogram(**facts) for name, facts in (event.histograms or {}).items()}
        if numbers or histograms:
            moment, step = datetime.fromisoformat(event.time).timestamp(), self._steps.step(event) or 0
            file.write(_record(_summary(moment, step, [*numbers.items(), *histograms.items()])))
            file.flush()

    def _open(self, run: str) -> None:
        folder, now = os.path.join(self._folder, run), time.time()
        os.makedirs(folder, exist_ok=True)
        name = f"events.out.tfevents.{int(now)}.{socket.gethostname()}.{os.getpid()}"
        self._files[run] = file = open(os.path.join(folder, name), "ab")  # noqa: SIM115 - closed with the run
        file.write(_record(_double(1, now) + _bytes(3, b"brain.Event:2")))

    def close(self) -> None:
        for file in self._files.values():
            file.close()


# --- The format: records with checksums, of messages of Protocol Buffers (tensorflow/core/util/event.proto)


def _summary(moment: float, step: int, values: Sequence[tuple[str, bytes]]) -> bytes:
    """Return an Event with these values by name, as a message of Protocol Buffers."""
    summary = b"".join(_bytes(1, _bytes(1, name.encode()) + value) for name, value in values)
    return _double(1, moment) + b"\x10" + _varint(step) + _bytes(5, summary)


def _scalar(number: float) -> bytes:
    return b"\x15" + struct.pack("<f", _single(number))


def _histogram(low: float, high: float, counts: Sequence[int], **totals: float) -> bytes:
    """Return a HistogramProto; in it a bin has its upper edge."""
    limits = [low + (high - low) * (i + 1) / len(counts) for i in range(len(counts) - 1)] + [high]
    fields = low, high, sum(counts), totals["sum"], totals["sum_squares"]
    content = b"".join(_double(field, value) for field, value in enumerate(fields, start=1))
    for field, values in ((6, limits), (7, counts)):
        content += _bytes(field, struct.pack(f"<{len(values)}d", *values))
    return _bytes(5, content)


def _single(number: float) -> float:
    """Return a number as a float32 holds it: infinite beyond."""
    try:
        struct.pack("<f", number)
    except OverflowError:
        return float("inf") if number > 0 else float("-inf")
    return number


def _double(field: int, number: float) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<d", number)


def _bytes(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*parts, number])


def _record(content: bytes) -> bytes:
    """Return the content between its length and their checksums."""
    length = struct.pack("<Q", len(content))
    return length + _checksum(length) + content + _checksum(content)


def _checksum(content: bytes) -> bytes:
    """Return CRC-32C, masked as in a TFRecord."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF)


def _entry(number: int) -> int:
    for _ in range(8):
        number = number >> 1 ^ (_CASTAGNOLI if number & 1 else 0)
    return number


_TABLE = [_entry(number) for number in range(256)]
