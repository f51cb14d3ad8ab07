"""Score Arrow batches with a model that stays in this process, or in that of its device (Spark's Python worker)."""

from __future__ import annotations

import functools
import json
import pickle
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pyarrow as pa

from tritium.data.idset import PARTITION_BITS
from tritium.data.schema import Field
from tritium.model.bad_rows import BadRows
from tritium.model.calls import BatchSize, CallState, Computing
from tritium.model.engine import Callee
from tritium.model.signature import Output, Signature
from tritium.predict import device_engine, kept
from tritium.predict.weights import receive
from tritium.spark.inside import unsafe

_CALLS_KEPT = 16

# Floating dtypes that are missing here become float32.
_ARROW = {
    "float64": pa.float64(),
    "int64": pa.int64(),
    "int32": pa.int32(),
    "int16": pa.int16(),
    "int8": pa.int8(),
    "uint8": pa.int16(),
    "bool": pa.bool_(),
}


def score(payload: bytes, sent: Any, batches: Iterator[Any]) -> Iterator[pa.Array]:
    """Yield one Arrow array of predictions for each batch of packed columns, as the function of the UDF.

    payload : the plan that `tritium.predict.spark` pickled.
    sent    : the handle that `weights.send` returned.
    batches : each an array, or a tuple of arrays in the order of the signature's inputs. An input that comes as bytes
              has two, which `as_bytes_or_array` makes.
    """
    from tritium.model.rows import RowReader
    from tritium.model.score import Scorer

    plan = pickle.loads(payload)
    on_error = plan["on_error"]
    if plan["decode"] is not None or not device_engine.is_needed(plan["device"]):
        kept.imported(plan)  # Before functions that may import it themselves.
    signature = Signature.from_json(json.loads(plan["signature"]))
    fields = [Field.from_json(f) for f in json.loads(plan["fields"])]
    decode = {} if plan["decode"] is None else kept.unpickled(plan["decode"], "decodes an input")
    reader = RowReader(fields, decode, on_error)
    partition, cpus, gpus = _task()
    calls = _calls(plan["content"], plan["device"], plan["computes"], plan["batch_size"])
    with _ready(plan, sent, cpus, gpus) as engine:
        scorer = Scorer(engine, signature, calls, isolate=on_error != "fail")
        seen = 0
        for columns in _gathered(batches, calls):
            ids = np.arange(seen, seen + len(columns[0]), dtype=np.int64) + (partition << PARTITION_BITS)
            seen += len(ids)
            inputs, bad = reader.read(_joined(columns, fields, plan["as_bytes"]), ids)
            predicted, failed = scorer.score(inputs)
            bad = bad.with_failed(failed, len(ids))
            predictions = to_arrow(signature, predicted)
            predictions = predictions if bad.valid is None else _with_nulls(predictions, bad.valid)
            yield _beside_reasons(predictions, bad) if on_error == "column" else predictions


def _gathered(batches: Iterator[Any], calls: CallState) -> Iterator[Sequence[pa.Array]]:
    """Yield the columns of the batches; batches with fewer rows than a call of the model takes are put together."""
    waiting: list[Sequence[pa.Array]] = []
    rows = 0
    for batch in batches:
        waiting.append(batch if isinstance(batch, tuple) else (batch,))
        rows += len(waiting[-1][0])
        if rows >= calls.rows:
            yield _concatenated(waiting)
            waiting, rows = [], 0
    if waiting:
        yield _concatenated(waiting)


def _concatenated(batches: list[Sequence[pa.Array]]) -> Sequence[pa.Array]:
    return batches[0] if len(batches) == 1 else [pa.concat_arrays(parts) for parts in zip(*batches, strict=True)]


def _joined(columns: Sequence[pa.Array], fields: Sequence[Field], as_bytes: Sequence[bool]) -> list[pa.Array]:
    """Return one array for each input."""
    arrays = iter(columns)
    return [
        unsafe.merged(next(arrays), next(arrays), np.dtype(field.travel), field.depth) if pair else next(arrays)
        for field, pair in zip(fields, as_bytes, strict=True)
    ]


def _with_nulls(predictions: pa.Array, valid: np.ndarray[Any, Any]) -> pa.Array:
    """Return the predictions of the valid rows at their places among all rows, with nulls between them."""
    return predictions.take(pa.array(np.cumsum(valid) - 1, mask=~valid))


def _beside_reasons(predictions: pa.Array, bad: BadRows) -> pa.Array:
    """Return predictions and reasons as an array of the type that `with_errors` makes."""
    reasons = pa.nulls(len(predictions), pa.string())
    if bad.reasons:
        reasons = pa.array([bad.reasons.get(row) for row in range(len(predictions))], pa.string())
    return pa.StructArray.from_arrays([predictions, reasons], fields=list(with_errors(predictions.type)))


def _task() -> tuple[int, int, list[str]]:
    """Return this task's partition, its cores, and the addresses of its GPUs."""
    from pyspark import TaskContext

    task = TaskContext.get()
    if task is None:
        return 0, 1, []
    gpus = task.resources().get("gpu")
    return task.partitionId(), task.cpus() or 1, list(gpus.addresses) if gpus else []


def _ready(plan: dict[str, Any], sent: Any, cpus: int, gpus: list[str]) -> AbstractContextManager[Callee]:
    """Return a context with the plan's model, ready to be called: in this process, or in its device's own."""
    if device_engine.is_needed(plan["device"]):
        return device_engine.connected(plan, sent, cpus=cpus, gpus=gpus)
    return kept.ready(plan, lambda: receive(plan["weights"], sent), cpus=cpus, gpus=gpus)


@functools.lru_cache(_CALLS_KEPT)
def _calls(content: str, device: str, computes: Computing, batch_size: BatchSize) -> CallState:
    """Return what the calls of a model in this process have shown."""
    return CallState(batch_size)


def arrow_type(output: Output) -> pa.DataType:
    """Return the column type of one output: double for one number per row, (nested) arrays otherwise."""
    if output.scalar:
        return pa.float64()
    kind = _ARROW.get(output.dtype, pa.float32())
    for _ in output.shape:
        kind = pa.list_(kind)
    return kind


def result_type(signature: Signature) -> pa.DataType:
    """Return the type of the UDF's result: the only output's, or a struct."""
    if signature.task == "classification":
        return pa.struct([("prediction", pa.float64()), ("probability", pa.list_(pa.float64()))])
    if len(signature.outputs) == 1:
        return arrow_type(signature.outputs[0])
    return pa.struct([(o.name, arrow_type(o)) for o in signature.outputs])


def with_errors(kind: pa.DataType) -> pa.DataType:
    """Return the type of results with the reasons of bad rows beside the predictions of this type."""
    return pa.struct([("predictions", kind), ("error", pa.string())])


def to_arrow(signature: Signature, predictions: dict[str, np.ndarray[Any, Any]]) -> pa.Array:
    """Return the predictions of one batch as an Arrow array of `result_type`."""
    kind = result_type(signature)
    if not pa.types.is_struct(kind):
        return _nested(predictions["prediction"], kind)
    parts = [_nested(predictions[kind.field(i).name], kind.field(i).type) for i in range(kind.num_fields)]
    return pa.StructArray.from_arrays(parts, fields=list(kind))


def _nested(rows: np.ndarray[Any, Any], kind: pa.DataType) -> pa.Array:
    """Return `[rows, n, m]` as lists of lists over one flat buffer."""
    if not pa.types.is_list(kind):
        return pa.array(rows.reshape(-1), type=kind)
    width = rows.shape[1] if rows.ndim > 1 else 1
    flat = rows.reshape(len(rows) * width, *rows.shape[2:])  # With -1, NumPy fails where a length is 0.
    offsets = pa.array(np.arange(len(rows) + 1, dtype=np.int32) * width)
    return pa.ListArray.from_arrays(offsets, _nested(flat, kind.value_type), type=kind)
