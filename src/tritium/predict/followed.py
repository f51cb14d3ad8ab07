"""Score a stream by the version that holds for its micro-batch (Spark's Python worker; driver side: following.py)."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import itertools
import os
import pickle
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from tritium import file_system
from tritium.errors import ModelError
from tritium.predict import worker
from tritium.predict.weights import scratch

_CHUNK = 16 << 20
_DECISIONS_KEPT = 16
_decided: OrderedDict[tuple[str, int], tuple[int, bytes, Any]] = OrderedDict()


def score(payload: bytes, sent: Any, batches: Iterator[Any]) -> Iterator[pa.Array]:
    """Do as `worker.score`, with a last column: the micro-batch's time. Yield structs of the result and the version.

    payload : the pickled facts of `Following`, with the `plan` of the version with which the query began.
    sent    : the handle of that version's weights.
    batches : their last column is the time of the micro-batch, in microseconds since 1970, the same in all rows.
    """
    facts = pickle.loads(payload)
    first = next((batch for batch in batches if len(batch[0])), None)
    if first is None:
        return
    number, plan, weights = _decision(facts, sent, first[-1][0].as_py())
    rest = (batch[:-1] if len(batch) > 2 else batch[0] for batch in itertools.chain([first], batches))
    for result in worker.score(plan, weights, rest):
        version = pa.array([number], pa.int64()).take(pa.array([0] * len(result), pa.int8()))
        yield pa.StructArray.from_arrays([result, version], names=["result", "version"])


def _decision(facts: dict[str, Any], sent: Any, time: int) -> tuple[int, bytes, Any]:
    """Return the number, plan and weights of the version that holds at a time: the last of those decided.

    A decision holds from a multiple of `every`. So the spool is read once in each such interval.
    """
    interval = time // facts["every"]
    key = (facts["id"], interval)
    if key not in _decided:
        best = (facts["number"], facts["plan"], sent)
        known = [decision for (name, before), decision in _decided.items() if name == key[0] and before < interval]
        best = max([best, *known], key=lambda decision: decision[0])
        for number, decision in _decisions(facts, best[0]):
            if decision["since"] <= interval * facts["every"]:
                name = pickle.loads(decision["plan"])["weights"]
                best = (number, decision["plan"], Spooled(f"{facts['spool']}/{name}", decision["sums"]))
                _forget(facts["id"], number)
                break
        while len(_decided) >= _DECISIONS_KEPT:
            _decided.popitem(last=False)
        _decided[key] = best
    return _decided[key]


def _decisions(facts: dict[str, Any], after: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the decisions for versions above `after`, the newest first."""
    store, root = file_system.opened(facts["spool"], shared=True)
    store.invalidate_cache()
    names = (name.rstrip("/").rpartition("/")[2] for name in store.ls(root, detail=False))
    for number in sorted((int(n) for n in names if n.isdigit() and int(n) > after), reverse=True):
        signed = store.cat_file(f"{root}/{number}")
        signature, body = signed[:32], signed[32:]
        if not hmac.compare_digest(signature, hmac.digest(facts["key"], body, hashlib.sha256)):
            raise ModelError(f"{facts['spool']}/{number} is damaged, or not by this query's driver. It is not used.")
        yield number, pickle.loads(body)


class Spooled:
    """The weights in a spool, as `weights.receive` takes them in a broadcast's place."""

    def __init__(self, path: str, sums: dict[str, Any]) -> None:
        self._path, self._sums = path, sums

    @property
    def value(self) -> Iterator[bytes]:
        """The pieces of the file. Raises ModelError after the last one if the file is damaged."""
        store, path = file_system.opened(self._path, shared=True)
        checksum = hashlib.sha256()
        with store.open(path, "rb") as file:
            while piece := file.read(_CHUNK):
                checksum.update(piece)
                yield piece
        if checksum.hexdigest() != self._sums["sha256"]:
            raise ModelError(f"{self._path} is damaged: its SHA-256 is not {self._sums['sha256'][:12]}….")


def _forget(name: str, number: int) -> None:
    """Remove this executor's weights of versions that no micro-batch needs any more; who has mapped them keeps them."""
    folder = scratch()
    for entry in os.listdir(folder) if folder else ():
        parts = entry.removeprefix("tritium-").split("-")
        if entry.startswith(f"tritium-{name}-") and int(parts[1]) < number - 1:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(str(folder), entry))
