"""When executors can't reach the driver: the coordinator runs in the first supervisor (supervisor, driver).

Only Spark Connect needs this: its client may sit behind a firewall or NAT. The address travels through one `allGather`
(a second); events, output and stored files come with the results instead of live.
"""

from __future__ import annotations

import base64
import json
import pickle
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tritium.errors import TritiumError, WireError
from tritium.gang.coordinator import Coordinator
from tritium.gang.failure import Failure
from tritium.gang.results import chunks
from tritium.observe.stored import Piece
from tritium.wire import Channel

if TYPE_CHECKING:
    from tritium.gang.supervisor import Supervisor

REACH_SECONDS = 3.0
_MARK = "tritium-failure:"


class Ledger:
    """What the driver would have seen, written down for later."""

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile()  # noqa: SIM115 - closed in supervise_far

    def _write(self, *entry: Any) -> None:
        pickle.dump(entry, self.file)

    def event(self, kind: str, **fields: Any) -> None:
        """Something happened."""
        self._write("event", kind, fields)

    def output(self, rank: int, text: str) -> None:
        """A rank has printed."""
        self._write("output", rank, text)

    def store(self, piece: Piece) -> None:
        """A rank stores a piece of a file."""
        self._write("store", piece)


def supervise_far(
    supervisor: Supervisor, context: Any, batches: Iterator[pa.RecordBatch], confirm: Callable[[], bool | None]
) -> Iterator[pa.RecordBatch]:
    """`Supervisor.run`, with the coordinator wherever every supervisor can reach it."""
    order = supervisor.order
    first = supervisor.partition == 0
    ledger = Ledger()
    own = None
    if first:
        own = Coordinator(
            order.size,
            launch=order.launch,
            run_id=order.run_id,
            observer=ledger,
            host="0.0.0.0",
            names=list(order.plan),
            stream=order.streams,
            secret=order.secret,
            patience=order.patience,
        ).start()
    try:
        host = context.getTaskInfos()[0].address.rpartition(":")[0]
        word = {"reached": _reaches(order.address, order.secret), "address": [host, own.address[1] if own else 0]}
        words = [json.loads(answer) for answer in context.allGather(json.dumps(word))]
        if all(w["reached"] for w in words):
            yield from supervisor.run(batches, confirm)
            return
        try:
            yield from supervisor.run(batches, confirm, (words[0]["address"][0], words[0]["address"][1]))
        except TritiumError as error:
            failure = supervisor.failure
            if failure is None:
                raise
            body = json.dumps({**failure.with_stacks(), "pickled": base64.b64encode(failure.pickled).decode()})
            packed = base64.b64encode(zlib.compress(body.encode())).decode()
            raise TritiumError(f"{error}\n{_MARK}{packed}") from error
        if own is not None:
            own.await_gone(10.0)
            yield from chunks(-1, "ledger", ledger.file)
    finally:
        if own is not None:
            own.close()
        ledger.file.close()


def _reaches(address: tuple[str, int], secret: bytes) -> bool:
    try:
        Channel.connect(address, secret, REACH_SECONDS).close()
    except WireError:
        return False
    return True


def replay(batches: Iterable[pa.RecordBatch], observer: Any) -> None:
    """Tell the driver's observer what a far coordinator has written down."""
    parts: dict[int, bytes] = {}
    for batch in batches:
        for _, kind, part, body in zip(*(batch.column(i).to_pylist() for i in range(4)), strict=True):
            if kind == "ledger":
                parts[part] = body
    if not parts:
        return
    observer.note("Executors could not reach this client, so logs and progress of this run came at its end.")
    with tempfile.TemporaryFile() as file:
        for part in sorted(parts):
            file.write(parts[part])
        file.seek(0)
        while True:
            try:
                what, *rest = pickle.load(file)
            except EOFError:
                return
            if what == "event":
                observer.event(rest[0], **rest[1])
            else:
                getattr(observer, what)(*rest)


def newest_checkpoint(run_dir: str) -> tuple[int, str] | None:
    """Step and place of the newest checkpoint, which a far coordinator heard of and could not tell (driver)."""
    from tritium.model.checkpoint import Store

    store = Store(run_dir)
    names = store.names()
    return (int(names[0].partition("-")[0]), store.where(names[0])) if names else None


def failure_in(text: str) -> Failure | None:
    """The failure that a far supervisor has put into its exception, if any."""
    start = text.find(_MARK)
    if start < 0:
        return None
    words = text[start + len(_MARK) :].split(None, 1)
    fields = json.loads(zlib.decompress(base64.b64decode(words[0])))
    return Failure.read(fields, base64.b64decode(fields.pop("pickled")))
