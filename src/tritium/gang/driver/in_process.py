"""`on="here"`: the only rank is this very process, for a debugger and for tests (driver).

The same receiver, spool and shard as on a cluster; what is missing is the child process and the network.
"""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any, Literal

from tritium.errors import BadSetting
from tritium.gang.driver.surroundings import surrounded
from tritium.gang.rank.checkpoints import finish, settle
from tritium.gang.rank.heartbeat import Pulse
from tritium.gang.rank.world import Peer, World, entered
from tritium.gang.supervisor.gpus import gpus_here

if TYPE_CHECKING:
    from tritium.data.shard import Shard
    from tritium.gang.driver.launch import Launch, Watch
    from tritium.observe.stored import Piece


def run(launch: Launch) -> list[Any]:
    """Call the function once, as rank 0 of 1. What it raises is raised as it is: a debugger stops where it happened."""
    gpus_here(launch.gang)
    with ExitStack() as stack:
        control = HereControl(launch.watch, _shards(launch, stack))
        device = "cuda:0" if launch.gang.gpus else "cpu"
        me = Peer(0, socket.gethostname(), "127.0.0.1", 0, device, os.getpid())
        world = World(0, 1, 0, 1, me.host, device, (me,), launch.run_id, control)
        stack.enter_context(entered(world))
        stack.callback(settle, world)
        stack.enter_context(surrounded(launch.gang, world))
        launch.watch.event("formed", peers=[vars(me)])
        result = launch.function(*launch.args, **launch.kwargs)
        finish(world)
        launch.watch.event("rank_ended", rank=0)
        return [result]


def _shards(launch: Launch, stack: ExitStack) -> dict[str, Shard]:
    if not launch.data:
        return {}
    from tritium.data.receiver import Receiver
    from tritium.data.shard import Shard
    from tritium.data.spool import Spool
    from tritium.data.tables import Tables
    from tritium.data.watermark import Feed, Watermark
    from tritium.gang.coordinator.coordinator import received
    from tritium.gang.supervisor.rows import plain_fingerprint

    tables = Tables(launch.data, 1)
    plan = tables.plan
    spools = {name: stack.enter_context(closing(Spool(fields))) for name, fields in plan.items()}
    receiver = Receiver(plan, spools, sorted=True)
    for batch in tables.batches(0):
        receiver.take(batch)
    receipt = receiver.finish(confirmed=True)
    prints = plain_fingerprint(receipt.fingerprint)
    whole = received({0: {"rows": receipt.rows, "fingerprint": prints}})
    launch.watch.event("received", **whole)
    shards = {}
    for name, fields in plan.items():
        feed = Feed(fingerprint=whole["fingerprint"].get(name))
        feed.publish(Watermark(receipt.rows[name], {0: receipt.rows[name]}, 1))
        shards[name] = stack.enter_context(
            closing(
                Shard(
                    name,
                    receipt.columns[name],
                    fields,
                    index=0,
                    size=1,
                    feed=feed,
                    decode=launch.data[name].decode,
                    tensors=launch.tensors,
                    prepared=prepared(launch.data[name].shuffle),
                    on_epoch_end=functools.partial(_note, launch.watch, name),
                    on_message=launch.watch.note,
                )
            )
        )
    return shards


def _note(watch: Watch, name: str, counts: Mapping[str, Any]) -> None:
    watch.event("counts", rank=0, name=name, **counts)


def prepared(shuffle: Any) -> Literal["full", "stream"] | bool:
    """What an exchange prepares for a kind of shuffle: rows as they arrive, or once all are there ("full", False)."""
    return "stream" if shuffle == "stream" else "full" if shuffle else False


class HereControl:
    """A gang of one in this process."""

    elastic = could_be_more = False
    store_limit: int | None = None

    def __init__(self, watch: Watch, shards: Mapping[str, Shard]) -> None:
        self.run_dir = watch.run_dir
        self._watch = watch
        self._shards = shards
        self.pulse = Pulse()

    def meet(self, operation: str, value: bytes, lane: str = "main") -> list[bytes]:
        """Alone, everyone has always come."""
        return [value]

    def post(self, operation: str, value: bytes, lane: str = "main") -> Callable[[], list[bytes]]:
        """As `meet`."""
        return lambda: [value]

    def tell(self, kind: str, **fields: Any) -> None:
        """To the events."""
        self._watch.event(kind, **fields)

    def log(self, fields: Mapping[str, Any]) -> None:
        """To the progress display and the events."""
        self._watch.event("log", rank=0, **fields)

    def store(self, piece: Piece) -> None:
        """To the run directory."""
        self._watch.store(piece)

    def shard(self, name: str) -> Shard:
        """A shard that is all rows."""
        if name not in self._shards:
            there = ", ".join(map(repr, self._shards)) or "none: launch(…, data={…}) names them"
            raise BadSetting(f"There is no shard {name!r}. There are: {there}.")
        return self._shards[name]

    def confirm_rows(self) -> None:
        """All are there before the function is called."""
