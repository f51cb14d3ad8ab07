"""Write a rank's rows from Spark's stream to its spools, and report their number (supervisor)."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from tritium.errors import TritiumError, WireError
from tritium.gang.control.client import Client
from tritium.gang.order import Order
from tritium.wire import Channel

if TYPE_CHECKING:
    from tritium.data.receiver import Receiver
    from tritium.data.spool import Spool

ROWS_SECONDS = 0.02
"""The least time between two reports of rows that may be taken as they arrive."""
AHEAD = 1 << 15
"""The rows (two windows) that are read before the rank is ready, also on a busy host."""
LOOK_SECONDS = 0.1
LOAD = "/proc/loadavg"


class Spooler:
    """Spools the rows of one rank. `check()` raises GangEnded when the gang has ended."""

    def __init__(
        self, order: Order, spools: Mapping[str, Spool], coordinator: Client, rank: Channel, check: Callable[[], None]
    ) -> None:
        from tritium.data.receiver import Receiver

        self.ready = threading.Event()
        """Set when the rank has imported its framework."""
        self._order = order
        self._spools = spools
        self._coordinator = coordinator
        self._rank = rank
        self._check = check
        self._receiver: Receiver = Receiver(order.plan, spools, sorted=order.sorted)
        self._announced: set[str] = set()
        self._reported = 0.0
        self._answer = b""
        self._answered = threading.Event()

    @property
    def rows(self) -> Mapping[str, int]:
        """The number of rows so far, by name."""
        return self._receiver.rows

    def run(self, batches: Iterator[pa.RecordBatch], confirm: Callable[[], bool | None]) -> None:
        """Spool all rows, and send a receipt to the coordinator.

        confirm : tells, after the last row, whether an unsorted stream was complete.

        Raises BadRow, SpoolFull, IncompleteShard, and GangEnded.
        """
        from tritium.data.few import Few

        few = Few() if self._order.deals_few else None
        for batch in self._unbroken(batches):
            self._check()
            self._receiver.take(batch)
            if few is not None:
                few.add(batch)
            self._report()
            self._give_way()
        self._check()
        confirmed = self._order.sorted or confirm()
        receipt = self._receiver.finish(confirmed=confirmed)
        first = receipt.first  # Kept from before rows are dealt, as it names them by Spark's own ids.
        if few is not None and (dealt := self._dealt(few.packed())):
            self._receiver.restart()
            for batch in few.dealt(dealt):
                self._receiver.take(batch)
            receipt = self._receiver.finish(confirmed=confirmed)
        body = {"columns": receipt.columns, "fingerprint": plain_fingerprint(receipt.fingerprint)}
        if receipt.skipped or first:
            body |= {"skipped": receipt.skipped, "first": first}
        self._coordinator.send("receipt", json.dumps(body).encode(), rows=receipt.rows)

    def _dealt(self, rows: bytes | None) -> bytes:
        """Send this rank's rows if they are few; return those that it takes instead, empty where it keeps its own."""
        self._coordinator.send("few", rows or b"", many=rows is None, rows=sum(self.rows.values()))
        while rows is not None and not self._answered.wait(LOOK_SECONDS):
            self._check()
        return self._answer

    def on_dealt(self, rows: bytes) -> None:
        """Take the coordinator's answer to `few`."""
        self._answer = rows
        self._answered.set()

    def announce(self, name: str, shapes: Mapping[str, Sequence[int]]) -> None:
        """Tell the rank where the rows of `name` are, with the `shapes` of columns that no row here has shown."""
        columns = self._spools[name].describe()
        for column in columns:
            if column.get("shape") is None:
                column["shape"] = shapes.get(column["name"])
        fields = [f.to_json() for f in self._order.plan[name]]
        body = json.dumps({"columns": columns, "fields": fields}).encode()
        with contextlib.suppress(WireError):  # If the rank has ended, the thread that waits for it reports how.
            self._rank.send("spool", body, name=name, prepared=self._order.prepared[name])

    def _report(self) -> None:
        now = time.monotonic()
        if now - self._reported < (ROWS_SECONDS if self._order.streams else 0.25):
            return
        self._reported = now
        for name, rows in self.rows.items():
            if rows and self._order.streams and name not in self._announced:
                # The rank must know the shape of rows before it may take any; the first row has shown it.
                self._announced.add(name)
                self.announce(name, {})
        self._coordinator.send("rows", rows=self.rows)

    def _give_way(self) -> None:
        """On a busy host, stop reading after AHEAD rows until the rank has imported its framework.

        Where rows are taken as they arrive, the first step waits only for that import, and reading further would take
        half of its CPU time (decision 011).
        """
        while self._order.streams and max(self.rows.values()) > AHEAD and not self.ready.is_set() and busy():
            self.ready.wait(LOOK_SECONDS)
            self._check()

    def _unbroken(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield Spark's batches; raise IncompleteShard in place of Arrow's error when the stream is cut short."""
        try:
            yield from batches
        except TritiumError:  # A table on the driver may hold a value that can't be converted.
            raise
        except Exception as error:
            raise self._receiver.cut_short() from error


def plain_fingerprint(fingerprint: Mapping[str, Mapping[int, Sequence[int]]]) -> dict[str, list[list[int]]]:
    """Return a fingerprint as JSON: name → list of [source partition, rows, sum, sum]."""
    return {name: [[partition, *part] for partition, part in parts.items()] for name, parts in fingerprint.items()}


def busy() -> bool:
    """Tell whether more threads are runnable than this process has cores; False where that is not known."""
    try:
        with open(LOAD, encoding="ascii") as file:
            running = int(file.read().split()[3].split("/")[0])
        return running > len(os.sched_getaffinity(0))
    except (OSError, AttributeError, ValueError, IndexError):  # Only Linux has this file.
        return False
