"""Score by the version that holds for a micro-batch, and time it (Spark's Python worker; driver: following.py)."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import itertools
import os
import pickle
import time
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from tritium import file_system
from tritium.errors import ModelError
from tritium.predict import worker
from tritium.predict.weights import scratch

_CHUNK = 16 << 20
_DECISIONS_KEPT = 16
Decision = tuple[int, int, bytes, Any]
"""Its order among those of the query, from 0; the version's number, its plan, and its weights."""
_decided: OrderedDict[tuple[str, int], Decision] = OrderedDict()


def score(payload: bytes, sent: Any, batches: Iterator[Any]) -> Iterator[pa.Array]:
    """Do as `worker.score`, and yield structs: the result, and the facts about it that the payload asks for.

    payload : pickled: the `plan` of the model; `following`, the facts of `Following`, or None; and whether rows are
              `timed`. A result that follows has the field `version`, a timed one `milliseconds`: how long the model
              took for the rows that it was given at once, and `beside`: how many those are.
    sent    : the handle of the weights that the plan names.
    batches : if it follows, their last column is the time of the micro-batch, in microseconds since 1970, the same in
              all rows.
    """
    facts = pickle.loads(payload)
    following, decision = facts["following"], (0, 0, facts["plan"], sent)
    first = next((batch for batch in batches if len(_columns(batch)[0])), None)
    if first is None:
        return
    if following is not None:
        decision = _decision(following, (0, following["number"], *decision[2:]), first[-1][0].as_py())
    source = _Source(itertools.chain([first], batches), drop_last=following is not None)
    results, begun = worker.score(decision[2], decision[3], source.batches()), time.perf_counter()
    for result in results:
        took = time.perf_counter() - begun - source.seconds
        values = {"result": result}
        if following is not None:
            values["version"] = _repeated(decision[1], len(result), pa.int64())
        if facts["timed"]:
            values["milliseconds"] = _repeated(took * 1000, len(result), pa.float64())
            values["beside"] = _repeated(len(result), len(result), pa.int64())
        yield pa.StructArray.from_arrays(list(values.values()), names=list(values))
        begun, source.seconds = time.perf_counter(), 0.0


class _Source:
    """Spark's batches, and how long it was waited for them."""

    def __init__(self, batches: Iterator[Any], drop_last: bool) -> None:
        self._batches, self._drop_last = batches, drop_last
        self.seconds = 0.0

    def batches(self) -> Iterator[tuple[pa.Array, ...]]:
        while True:
            begun = time.perf_counter()
            batch = next(self._batches, None)
            self.seconds += time.perf_counter() - begun
            if batch is None:
                return
            yield _columns(batch)[:-1] if self._drop_last else _columns(batch)


def _columns(batch: Any) -> tuple[pa.Array, ...]:
    return batch if isinstance(batch, tuple) else (batch,)


def _repeated(value: float, count: int, kind: pa.DataType) -> pa.Array:
    return pa.array([value], kind).take(pa.array(np.zeros(count, np.int8)))


def _decision(facts: dict[str, Any], first: Decision, moment: int) -> Decision:
    """Return the decision that holds at a moment: the last one, else `first`.

    A decision holds from a multiple of `every`. So the spool is read once in each such interval.
    """
    interval = moment // facts["every"]
    key = (facts["id"], interval)
    if key not in _decided:
        best = first
        known = [decision for (name, before), decision in _decided.items() if name == key[0] and before < interval]
        best = max([best, *known], key=lambda decision: decision[0])
        for order, decision in _decisions(facts, best[0]):
            if decision["since"] <= interval * facts["every"]:
                name = pickle.loads(decision["plan"])["weights"]
                weights = Spooled(f"{facts['spool']}/{name}", decision["sums"])
                best = (order, decision["number"], decision["plan"], weights)
                _forget(facts["id"], order)
                break
        while len(_decided) >= _DECISIONS_KEPT:
            _decided.popitem(last=False)
        _decided[key] = best
    return _decided[key]


def _decisions(facts: dict[str, Any], after: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the decisions after the one of order `after`, the newest first."""
    store, root = file_system.opened(facts["spool"], shared=True)
    store.invalidate_cache()
    names = (name.rstrip("/").rpartition("/")[2] for name in store.ls(root, detail=False))
    for order in sorted((int(n) for n in names if n.isdigit() and int(n) > after), reverse=True):
        signed = store.cat_file(f"{root}/{order}")
        signature, body = signed[:32], signed[32:]
        if not hmac.compare_digest(signature, hmac.digest(facts["key"], body, hashlib.sha256)):
            raise ModelError(f"{facts['spool']}/{order} is damaged, or not by this query's driver. It is not used.")
        yield order, pickle.loads(body)


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


def _forget(name: str, order: int) -> None:
    """Remove this executor's weights of versions that no micro-batch needs any more; who has mapped them keeps them."""
    folder = scratch()
    for entry in os.listdir(folder) if folder else ():
        parts = entry.removeprefix("tritium-").split("-")
        if entry.startswith(f"tritium-{name}-") and int(parts[1]) < order - 1:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(str(folder), entry))
