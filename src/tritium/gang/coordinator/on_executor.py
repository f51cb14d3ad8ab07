"""Run the coordinator in the first supervisor, when executors can't reach the driver (supervisor, driver).

Only Spark Connect needs this, as its client may be behind a firewall or NAT. Supervisors exchange the address by one
`allGather` of Spark's, which takes a second. Events, output and stored files are returned with the results instead of
live (deferred_log.py).
"""

from __future__ import annotations

import base64
import json
import os
import re
import socket
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pyarrow as pa

from tritium.errors import CheckpointFailed, TritiumError, WireError
from tritium.gang.coordinator.coordinator import Coordinator
from tritium.gang.coordinator.deferred_log import DeferredLog, tell
from tritium.gang.failure import Failure
from tritium.gang.order import Order
from tritium.gang.supervisor.results import chunks
from tritium.gang.supervisor.supervisor import Supervisor
from tritium.gang.supervisor.task import in_task
from tritium.spark.inside.end_of_stream import stream_is_complete
from tritium.wire import Channel

REACH_SECONDS = 3.0
PICKLED_BYTES = 1 << 18  # The limit of a pickled exception in Spark's text, which goes to logs and the UI.
_MARK = "tritium-failure:"
_SIZE = re.compile(r"(\d+)([bkmgtp]?)b?")


def supervise(payload: bytes, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Do as `task.supervise`, with a coordinator on the driver or, if need be, on the first task's executor."""
    return in_task(payload, lambda supervisor, context: run(supervisor, context, batches, stream_is_complete))


def run(
    supervisor: Supervisor, context: Any, batches: Iterator[pa.RecordBatch], confirm: Callable[[], bool | None]
) -> Iterator[pa.RecordBatch]:
    """Yield from `Supervisor.run`; the coordinator is in the first task when a supervisor can't reach the driver's."""
    order = supervisor.order
    first = supervisor.partition == 0
    host = context.getTaskInfos()[0].address.rpartition(":")[0].strip("[]")  # Spark writes IPv6 in brackets.
    coordinator = deferred = None
    if first:
        deferred = DeferredLog(order.run_dir, order.run_id, order.result_limit)
        coordinator = Coordinator(
            order.size,
            launch=order.launch,
            run_id=order.run_id,
            observer=deferred,
            # IPv6 where this machine has it, as an executor that is known by name may be reached by either.
            host="::" if ":" in host or socket.has_dualstack_ipv6() else "0.0.0.0",
            names=list(order.plan),
            stream=order.streams,
            secret=order.secret,
            certificate=order.certificate,
            stall_limit=order.stall_limit,
            accelerators=order.accelerators,
            store_limit=deferred.store_limit,
        ).start()
    try:
        word = {
            "reached": _reaches(order),
            "address": [host, coordinator.address[1] if coordinator else 0],
        }
        words = [json.loads(answer) for answer in context.allGather(json.dumps(word))]
        if all(w["reached"] for w in words):
            yield from supervisor.run(batches, confirm)
            return
        try:
            yield from supervisor.run(batches, confirm, (words[0]["address"][0], words[0]["address"][1]))
        except TritiumError as error:
            failure = supervisor.ending.failure or (coordinator.failure if coordinator is not None else None)
            if failure is None:
                raise
            raise _marked(error, failure) from error
        if coordinator is not None and deferred is not None:
            coordinator.await_gone(10.0)
            coordinator.close()  # Nothing is recorded after this.
            try:
                deferred.wait_for_uploads()
            except TritiumError as error:
                raise _marked(error, Failure.of(error, 0, host=supervisor.host, pid=os.getpid())) from error
            with deferred.written(coordinator.result_bytes) as file:
                coordinator = None
                yield from chunks(-1, "deferred", file)
    finally:
        if coordinator is not None:
            coordinator.close()
        if deferred is not None:
            deferred.close()


def _marked(error: TritiumError, failure: Failure) -> TritiumError:
    """Return an error whose text carries the failure through Spark to the driver; see `failure_in`."""
    pickled = failure.pickled if len(failure.pickled) <= PICKLED_BYTES else b""  # The failure has its text.
    body = json.dumps({**failure.with_stacks(), "pickled": base64.b64encode(pickled).decode()})
    packed = base64.b64encode(zlib.compress(body.encode())).decode()
    return TritiumError(f"{error}\n{_MARK}{packed}")


def _reaches(order: Order) -> bool:
    try:
        Channel.connect(order.address, order.secret, REACH_SECONDS, order.certificate).close()
    except WireError:
        return False
    return True


def replay(batches: Iterable[pa.RecordBatch], observer: Any) -> None:
    """Pass the log of a coordinator on an executor, if the results have one, to the driver's observer."""
    parts: dict[int, bytes] = {}
    for batch in batches:
        for _, kind, part, body in zip(*(batch.column(i).to_pylist() for i in range(4)), strict=True):
            if kind == "deferred":
                parts[part] = body
    if not parts:
        return
    observer.note("Executors could not reach this client, so logs and progress of this run came at its end.")
    tell((parts[part] for part in sorted(parts)), observer)


def result_limit(spark: Any) -> int:
    """Return the bytes that this session's Spark accepts for all results together; 0: any number."""
    text = str(spark.conf.get("spark.driver.maxResultSize", "1g")).strip().lower()
    match = _SIZE.fullmatch(text)
    return int(match[1]) << 10 * "bkmgtp".index(match[2] or "b") if match else 0


def newest_checkpoint(run_dir: str) -> tuple[int, str] | None:
    """Return step and path of the newest checkpoint in `run_dir`; None where there is none, or none is listed (driver).

    Needed when the log of a coordinator on an executor was lost with a failed attempt.
    """
    from tritium.checkpoint.store import Store

    store = Store(run_dir)
    try:
        names = store.names()
    except CheckpointFailed:  # The error that ended the attempt is raised, not this one.
        return None
    return (int(names[0].partition("-")[0]), store.where(names[0])) if names else None


def failure_in(text: str) -> Failure | None:
    """Return the failure that a supervisor has put into the text of its exception (`_marked`), if any."""
    start = text.find(_MARK)
    if start < 0:
        return None
    words = text[start + len(_MARK) :].split(None, 1)
    fields = json.loads(zlib.decompress(base64.b64decode(words[0])))
    return Failure.read(fields, base64.b64decode(fields.pop("pickled")))
