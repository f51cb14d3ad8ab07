"""Score Arrow batches with a model that stays in the process (Spark's Python worker)."""

from __future__ import annotations

import copy
import functools
import gc
import json
import pickle
import socket
import sys
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from tritium import frameworks
from tritium.data.idset import PARTITION_BITS
from tritium.data.schema import Field
from tritium.errors import TritiumError, WrongVersion
from tritium.frameworks.at_import import before_import, without_collections
from tritium.frameworks.framework import Framework
from tritium.model.bad_rows import BadRows
from tritium.model.calls import BatchSize, CallState, Computing
from tritium.model.engine import Engine
from tritium.model.engines import registry
from tritium.model.signature import Output, Signature
from tritium.predict.weights import receive
from tritium.spark.inside import unsafe
from tritium.triton_first import import_triton


@dataclass
class _Kept:
    """A model that stays in the process, and what its calls have shown, by the batch size that was asked for."""

    engine: Engine
    calls: dict[BatchSize, CallState] = field(default_factory=dict)


_MODELS_KEPT = 4  # A stream uses the same model in each micro-batch, and to restore one takes long.
_models: OrderedDict[tuple[str, str, Computing], _Kept] = OrderedDict()

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
    framework = frameworks.find(registry.find(plan["engine"]).framework)
    framework = None if framework is None else framework.predicting(plan["facts"])
    _need(framework)
    signature = Signature.from_json(json.loads(plan["signature"]))
    fields = [Field.from_json(f) for f in json.loads(plan["fields"])]
    reader = RowReader(fields, _unpickled(plan["decode"], "decodes an input"), plan["on_error"])
    partition, cpus, gpus = _task()
    with nullcontext() if framework is None else framework.threads(cpus):
        kept = _restored(plan, sent, gpus)
        engine, batch_size = kept.engine, plan["batch_size"]
        engine.use_threads(cpus)
        if plan["transform"] is not None:
            engine = copy.copy(engine)  # The kept one serves every model of these weights and this code.
            engine.transform = _unpickled(plan["transform"], "transforms the inputs")
        on_error = plan["on_error"]
        calls = kept.calls.setdefault(batch_size, CallState(batch_size))
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


def _unpickled(code: bytes, does: str) -> Any:
    """Return functions that a model applies to its inputs. Raises TritiumError where this executor lacks a package."""
    try:
        return pickle.loads(code)
    except (ImportError, AttributeError) as error:
        raise TritiumError(
            f"The function that {does} can't run on this executor: {error}. Install the missing package "
            "there; your own modules go along by value, what is in site-packages does not."
        ) from error


def _with_nulls(predictions: pa.Array, valid: np.ndarray[Any, Any]) -> pa.Array:
    """Return the predictions of the valid rows at their places among all rows, with nulls between them."""
    return predictions.take(pa.array(np.cumsum(valid) - 1, mask=~valid))


def _beside_reasons(predictions: pa.Array, bad: BadRows) -> pa.Array:
    """Return predictions and reasons as an array of the type that `with_errors` makes."""
    reasons = pa.nulls(len(predictions), pa.string())
    if bad.reasons:
        reasons = pa.array([bad.reasons.get(row) for row in range(len(predictions))], pa.string())
    return pa.StructArray.from_arrays([predictions, reasons], fields=list(with_errors(predictions.type)))


@functools.cache
def _need(framework: Framework | None) -> None:
    """Import the framework, once in this process, and exempt its objects from garbage collection.

    A worker of Spark's daemon collects garbage after every task: with torch's 180,000 objects that takes 0.25 s of a
    core (torch 2.13), longer than the micro-batch of a stream, and the next task waits for it.
    """
    if framework is None:
        return
    before_import("tensorflow", import_triton)
    try:
        with without_collections():
            framework.load()
    except ImportError as error:
        raise WrongVersion(
            f"{sys.executable} on {socket.gethostname()} can't import {framework.name}: {error}. Executors that score "
            "with a model need it: install it there, or set PYSPARK_PYTHON (spark.pyspark.python with spark-submit) to "
            "a Python that has it before the session is made."
        ) from error
    gc.collect()
    gc.freeze()


def _task() -> tuple[int, int, list[str]]:
    """Return this task's partition, its cores, and the addresses of its GPUs."""
    from pyspark import TaskContext

    task = TaskContext.get()
    if task is None:
        return 0, 1, []
    gpus = task.resources().get("gpu")
    return task.partitionId(), task.cpus() or 1, list(gpus.addresses) if gpus else []


def _restored(plan: dict[str, Any], sent: Any, gpus: list[str]) -> _Kept:
    """Return the plan's model on its device, ready to be called: the one that this process has already, if any."""
    kind = registry.find(plan["engine"])
    device = kind.task_device(plan["device"], gpus)
    key = (plan["content"], device, plan["computes"])
    if key in _models:
        _models.move_to_end(key)
        return _models[key]
    weights = receive(plan["weights"], sent)
    try:
        engine = kind.restore(weights, plan["facts"], plan["code"], device=device)
    except (ImportError, AttributeError) as error:
        raise TritiumError(
            f"The model's code can't run on this executor: {error}. Install the missing package there; your own "
            "modules go along by value, what is in site-packages does not."
        ) from error
    engine.computes = plan["computes"]
    while len(_models) >= _MODELS_KEPT:
        _models.popitem(last=False)
    _models[key] = _Kept(engine)
    return _models[key]


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
