"""The log of a coordinator on an executor, which the driver reads when the run has ended (supervisor, driver)."""

from __future__ import annotations

import heapq
import os
import tempfile
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import IO, Any

from tritium import file_system
from tritium.errors import StoreFailed
from tritium.events import (
    CheckpointLoaded,
    CheckpointSaved,
    EpochCounted,
    Event,
    FileStored,
    GangFormed,
    NonFatalError,
    Note,
    RankEnded,
    RowsReceived,
    StepsTraced,
    read,
    stamped,
)
from tritium.observe.run_directory import run_at
from tritium.observe.stored import Piece, StoredFiles
from tritium.wire import CHUNK, Codec, Message

LOG_BYTES = 8 << 20
"""So much is kept of the first events and output, and at least as much of the last."""
SHARE = 0.9  # The rest of Spark's limit is for Arrow, whose rows are somewhat larger than their content.
_READ = 1 << 20
# These events are always kept. Of all others, and of output, those in the middle may be left out.
_EVER = (
    GangFormed,
    RowsReceived,
    EpochCounted,
    CheckpointSaved,
    CheckpointLoaded,
    FileStored,
    StepsTraced,
    NonFatalError,
    RankEnded,
)


class DeferredLog:
    """An observer that keeps events, output and files up to a limit, as they are returned with the ranks' results.

    Files that ranks store are written to the run directory where this process reaches it (its `run.json` has the run's
    id); otherwise they are returned, too.

    limit : the bytes that Spark accepts for all results together; 0: any number.
    """

    def __init__(self, run_dir: str, run_id: str, limit: int) -> None:
        self._limit = int(limit * SHARE)
        self._stored = _reached(run_dir, run_id)
        self._run_dir = run_dir
        self._codec = Codec(None, b"")
        self._number = 0
        self._left_out = 0
        self._kept = _file()
        self._logs = [_file()]  # The first part; two more at most follow, the latest.
        self._counts = [0]

    @property
    def store_limit(self) -> int | None:
        """Bytes of all files that can be stored; None: no limit."""
        return self._limit if self._limit and self._stored is None else None

    def event(self, event: Event) -> None:
        """Keep an event."""
        self._write("event", stamped(event).to_json().encode(), ever=isinstance(event, _EVER))

    def output(self, rank: int, text: str) -> None:
        """Keep output of a rank."""
        self._write("output", text.encode("utf-8", "backslashreplace"), ever=False, rank=rank)

    def spans(self, rank: int, line: bytes) -> None:
        """Keep spans of a rank's steps."""
        self._write("spans", line, ever=False, rank=rank)

    def store(self, piece: Piece) -> None:
        """Store or keep a piece of a file. Raises StoreFailed when it would exceed Spark's limit."""
        if self._stored is not None:
            if self._stored.add(piece):
                self.event(FileStored(name=piece.name))
            return
        needed = self._kept.tell() + len(piece.body)
        if self._limit and needed > self._limit:
            raise StoreFailed(
                f"{piece.name} could not be stored: executors reach neither this client nor its run directory "
                f"{self._run_dir}, so stored files travel with the results, and {needed:,} bytes are over "
                f"{self._limit:,}, which is what spark.driver.maxResultSize lets through. Raise that setting where the "
                "Connect server is started, or choose a run_dir that executors and client reach (s3://…).",
                path=piece.name,
                written=piece.start,
                needed=needed,
                free=max(0, self._limit - self._kept.tell()),
            )
        self._write("store", piece.body, ever=True, **piece.fields())

    def wait_for_uploads(self) -> None:
        """Wait until every stored file is in the run directory. Raises StoreFailed."""
        for name in self._stored.wait_for_uploads() if self._stored is not None else ():
            self.event(FileStored(name=name))

    def written(self, results: int) -> IO[bytes]:
        """Return everything in order as one file, without the logs where `results` bytes of results need their room."""
        logs = sum(file.seek(0, os.SEEK_END) for file in self._logs)
        if self._limit and results + self._kept.tell() + logs > self._limit:
            self._left_out += sum(self._counts)
            for file in self._logs:
                file.close()
            self._logs, self._counts = [], []
        if self._left_out:
            text = (
                f"{self._left_out:,} events and pieces of output of this run were left out: executors could not reach "
                "this client, and what travels with the results is limited (spark.driver.maxResultSize)."
            )
            self._write("event", stamped(Note(text=text)).to_json().encode(), ever=True)
        whole = _file()
        for message in heapq.merge(_read(self._kept), chain.from_iterable(map(_read, self._logs)), key=_number):
            for part in self._codec.encode(message):
                whole.write(part)
        return whole

    def close(self) -> None:
        """Delete the log, and files that ranks have not stored completely."""
        if self._stored is not None:
            self._stored.close()
        for file in (self._kept, *self._logs):
            file.close()

    def _write(self, kind: str, body: bytes, *, ever: bool, **fields: Any) -> None:
        self._number += 1
        file = self._kept if ever else self._log()
        for part in self._codec.encode(Message(kind, {**fields, "number": self._number}, body)):
            file.write(part)
        if not ever:
            self._counts[-1] += 1

    def _log(self) -> IO[bytes]:
        if self._logs[-1].tell() >= LOG_BYTES:
            self._logs.append(_file())
            self._counts.append(0)
            if len(self._logs) > 3:
                self._logs.pop(1).close()
                self._left_out += self._counts.pop(1)
        return self._logs[-1]


def _file() -> IO[bytes]:
    return tempfile.TemporaryFile()


def _reached(run_dir: str, run_id: str) -> StoredFiles | None:
    try:
        if run_at(run_dir) != run_id:
            return None
        return StoredFiles(run_dir, file_system.opened(run_dir) if "://" in run_dir else None)
    except Exception:  # noqa: BLE001 - any error means that this process can't reach the run directory
        return None


def _read(file: IO[bytes]) -> Iterator[Message]:
    file.seek(0)
    codec = Codec(None, b"")
    while data := file.read(_READ):
        yield from codec.feed(data)


def _number(message: Message) -> int:
    return int(message["number"])


def tell(pieces: Iterable[bytes], observer: Any) -> None:
    """Pass the content of a DeferredLog to an observer. Unpickles nothing."""
    codec = Codec(None, b"")
    for data in pieces:
        for start in range(0, len(data), CHUNK):
            for message in codec.feed(data[start : start + CHUNK]):
                if message.kind == "event":
                    observer.event(read(message.blob))
                elif message.kind == "output":
                    observer.output(int(message["rank"]), message.blob.decode("utf-8", "replace"))
                elif message.kind == "spans":
                    observer.spans(int(message["rank"]), message.blob)
                elif message.kind == "store":
                    observer.store(Piece.read(message.fields, message.blob))
