"""Checks tables and arrays against a signature, column by column (any process)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa

from tritium.data import narrow
from tritium.data.codec import normalized
from tritium.data.decode import content_of
from tritium.data.idset import PARTITION_BITS, POSITION
from tritium.data.plan import plan
from tritium.data.schema import Data, Field
from tritium.data.types import SourceType, columns_of
from tritium.errors import BadData, BadRow, SignatureMismatch
from tritium.hints import suggest
from tritium.model.signature import Input, Signature, shown

_FAMILY = {"decimal": "number", "vector": "array"}
_SCALAR = SourceType("number", "double", "float64")
_NULLS_AS = {"number": pa.float64(), "string": pa.string(), "binary": pa.binary()}
"""Family of types → the type of its nulls."""


def fields(signature: Signature, schema: Any) -> dict[str, Field]:
    """Return how each input is read from a pyspark StructType or a pyarrow Schema. No data is read.

    Raises SignatureMismatch that lists every difference: a missing column, another type, another shape.
    """
    columns = columns_of(schema)
    differences = [d for i in signature.inputs for d in differences_of(i, columns)]
    planned_fields: dict[str, Field] = {}
    if not differences:
        for taken in signature.inputs:
            try:
                (planned,) = plan(schema, settings_of(taken, columns), taken.name)
                planned_fields[taken.name] = dataclasses.replace(planned, shape=_known(taken.shape))
            except BadData as error:
                differences += [f"input {taken.name!r}: {p}" for p in error.problems]
    if differences:
        raise mismatch(differences)
    return planned_fields


def _known(shape: tuple[int | None, ...]) -> tuple[int, ...] | None:
    return None if None in shape else tuple(n for n in shape if n is not None)


def mismatch(differences: list[str]) -> SignatureMismatch:
    """Return one error with all the differences."""
    listed = "".join(f"\n  - {d}" for d in differences)
    count = f"{len(differences)} difference{'s' * (len(differences) > 1)}"
    return SignatureMismatch(f"The data does not fit the model's signature, {count}:{listed}", differences=differences)


def differences_of(taken: Input, columns: Mapping[str, SourceType]) -> list[str]:
    differences = []
    for position, name in enumerate(taken.columns):
        if name not in columns:
            differences.append(f"missing column {name!r} (input {taken.name!r}).{suggest(name, columns)}")
            continue
        kind = columns[name]
        leaf, depth = kind.leaf()
        trained = taken.types[position] if taken.types else None
        wanted = _leaf_wanted(taken, trained)
        here = f"column {name!r} is {kind.text}, and the model takes"
        if _FAMILY.get(leaf.name, leaf.name) not in wanted:
            differences.append(f"{here} a {wanted[0]} ({taken.dtype}).")
        elif depth != (expected := _depth(taken, kind)):
            what = {0: "one value", 1: "an array"}.get(expected, "an array of arrays")
            differences.append(f"{here} {what} a row (input {taken.name!r} {shown(taken.shape)}).")
        elif taken.codec.get("kind") == "bytes" and content_of(kind) is None:
            differences.append(f"{here} an integer, which is decoded.")
        elif leaf.dtype.startswith("float") and np.dtype(taken.dtype).kind in "iu" and not _coded(taken):
            differences.append(f"{here} {taken.dtype}: fractions would be lost. Cast it if that is meant.")
        elif kind.width is not None and taken.shape and kind.width != (taken.shape[0] or kind.width):
            differences.append(f"{here} {taken.shape[0]} values a row.")
    return differences


def with_types(signature: Signature, table: pa.Table) -> pa.Table:
    """Return `table` with a type for each column of an input that holds only nulls, or arrays of nulls.

    Pandas and Arrow know no type of such a column, which a batch of one row may well have. It gets the type that the
    model takes, so that its nulls are read as in any other batch.
    """
    for taken in signature.inputs:
        wanted = _NULLS_AS.get(_leaf_wanted(taken, taken.types[0] if taken.types else None)[0])
        depth = _depth(taken, _SCALAR)
        for name in taken.columns:
            if wanted is None or name not in table.column_names or not _untyped(table.schema.field(name).type):
                continue
            kind = wanted
            for _ in range(depth):
                kind = pa.list_(kind)
            if not pa.types.is_nested(table.schema.field(name).type) or depth:
                table = table.set_column(table.column_names.index(name), name, table.column(name).cast(kind))
    return table


def kinds_of_columns(signature: Signature) -> dict[str, tuple[str, int]]:
    """Return, for each source column, the family of its values ("number", "string", …) and the depth of its arrays."""
    kinds = {}
    for taken in signature.inputs:
        for position, name in enumerate(taken.columns):
            wanted = _leaf_wanted(taken, taken.types[position] if taken.types else None)
            kinds[name] = wanted[0], _depth(taken, _SCALAR)
    return kinds


def _untyped(kind: pa.DataType) -> bool:
    return _untyped(kind.value_type) if pa.types.is_list(kind) else bool(pa.types.is_null(kind))


def _coded(taken: Input) -> bool:
    return bool(taken.codec.get("vocabulary") or taken.codec.get("buckets"))


def _leaf_wanted(taken: Input, trained: str | None) -> tuple[str, ...]:
    """Return the families of types that fit, by the column's type at training."""
    # A function decodes such an input, and no example has shown of which type the values are.
    if taken.codec.get("kind") == "bytes" and not taken.types:
        return ("string", "binary", "number", "image")
    if _coded(taken) or taken.codec.get("content") == "string":
        return ("string",)
    if trained in ("date", "timestamp", "binary", "image"):
        return (trained,)
    return ("number",) if trained else ("number", "date", "timestamp")


def _depth(taken: Input, kind: SourceType) -> int:
    """Return the depth of arrays in which each source column holds its values."""
    if len(taken.columns) > 1 or taken.codec.get("packed"):
        return 0
    if taken.codec:
        return int(taken.codec.get("depth") or 0)
    return 0 if taken.shape in ((), (1,)) and kind.scalar else len(taken.shape)


def settings_of(taken: Input, columns: Mapping[str, SourceType]) -> Data:
    """Return the Data that reads this input as the training did."""
    codec = taken.codec
    packs = len(taken.columns) > 1 or codec.get("packed") or (taken.shape == (1,) and not codec)
    packs = packs and columns[taken.columns[0]].scalar
    names = {taken.name: taken}
    nulls = codec.get("nulls") or ()
    # Unless the training asked for the rounding of integers, they must be exact. A timestamp is packed with others only
    # where it asked.
    asked = codec.get("asked") or "timestamp" in taken.types
    return Data(
        None,
        columns={taken.name: list(taken.columns) if packs else taken.columns[0]},
        dtype={taken.name: taken.dtype} if asked else None,
        default_dtype=None if asked else {taken.name: taken.dtype},
        vocabulary={n: codec["vocabulary"] for n in names if codec.get("vocabulary")},
        unknown_words="keep" if codec.get("unknown") else "error",
        hash_buckets={n: codec["buckets"] for n in names if codec.get("buckets")},
        pad={n: tuple(codec["pad"]) for n in names if codec.get("pad")},
        decode={n: bytes for n in names if codec.get("kind") == "bytes"},  # The plan asks only whether it is decoded.
        nulls={s: v for s, v in zip(taken.columns, nulls, strict=False) if v is not None},
        nan=codec.get("nan") or "error",
        normalize=_normalize_of(taken),
    )


def _normalize_of(taken: Input) -> dict[str, tuple[Any, Any]]:
    """Return the means and deviations of an input as `Data` takes them."""
    mean, std = taken.codec.get("mean") or (), taken.codec.get("std") or ()
    if taken.codec.get("packed"):
        return {column: (m, s) for column, m, s in zip(taken.columns, mean, std, strict=False)}
    return {taken.name: (mean, std)} if mean else {}


@contextmanager
def advising() -> Iterator[None]:
    """Replace the advice in the error for a null, a NaN or an infinity by that for prediction."""
    try:
        yield
    except BadRow as error:
        value = error.value
        if value is not None and not (isinstance(value, float) and not math.isfinite(value)):
            raise
        if error.column is None or error.batch_column is None or error.row_id is None:
            raise
        raise refused(error.column, error.batch_column, error.row_id, value) from None


def place_of(row_id: int) -> str:
    """Return where the row with this id is, for messages."""
    return f"row {row_id & POSITION} of partition {row_id >> PARTITION_BITS}"


def refused(column: str, taken: str, row_id: int, value: float | None) -> BadRow:
    """Return the error for a null, a NaN or an infinity at prediction."""
    # The code works on DataFrames of Spark and of pandas; dropna drops NaN in both.
    what = "null" if value is None else "NaN"
    remedy = f"df.dropna(subset=[{column!r}]), fill them, df.fillna({{{column!r}: value}})"
    if value is not None and math.isinf(value):
        what = "infinite, or beyond what the model computes in,"
        remedy = f"df[df[{column!r}].between(-3.4e38, 3.4e38)]"
    return BadRow(
        f"column {column!r} is {what} in {place_of(row_id)} (input {taken!r}), and the model was trained "
        f"without. Drop such rows before, {remedy}, or let transform go on without them: "
        "on_error='skip', 'null' or 'column'.",
        reason=f"column {column!r} is {what.removesuffix(',')}",
        column=column,
        row_id=row_id,
        value=value,
    )


def from_arrays(signature: Signature, data: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Return the model's inputs `[rows, *shape]` by name, from an array or tensor, or a mapping of them by input.

    Raises SignatureMismatch with every difference, and BadRow for a value that can't be used.
    """
    if not isinstance(data, Mapping):
        if len(signature.inputs) > 1:
            names = ", ".join(repr(i.name) for i in signature.inputs)
            raise mismatch([f"the model takes {len(signature.inputs)} inputs, {names}: give a mapping of them."])
        data = {signature.inputs[0].name: data}
    arrays: Mapping[str, Any] = data
    fitting: dict[str, np.ndarray[Any, Any]] = {}
    differences = []
    known = [i.name for i in signature.inputs]
    differences += [f"there is no input {n!r}.{suggest(n, known)}" for n in arrays if n not in known]
    for taken in signature.inputs:
        if taken.name not in arrays:
            differences.append(f"input {taken.name!r} is missing.")
            continue
        array = _numpy(arrays[taken.name])
        if array.shape[1:] == () and taken.shape == (1,):
            array = array.reshape(-1, 1)
        same = len(array.shape) == len(taken.shape) + 1 and all(
            w in (None, n) for w, n in zip(taken.shape, array.shape[1:], strict=True)
        )
        if not same:
            differences.append(
                f"input {taken.name!r} should be {shown(taken.shape)}, and has the shape {list(array.shape)}."
            )
        elif array.dtype.kind not in "fiub" or (array.dtype.kind == "f" and np.dtype(taken.dtype).kind != "f"):
            differences.append(f"input {taken.name!r} should be {taken.dtype}, and is {array.dtype}.")
        else:
            fitting[taken.name] = array
    if not differences and len({len(a) for a in fitting.values()}) > 1:
        differences.append(f"the inputs differ in rows: { {n: len(a) for n, a in fitting.items()} }.")
    if differences:
        raise mismatch(differences)
    return {taken.name: _as_taken(taken, fitting[taken.name]) for taken in signature.inputs}


def _numpy(value: Any) -> np.ndarray[Any, Any]:
    if hasattr(value, "detach"):  # By its method: to ask for the class would import torch.
        value = value.detach().cpu()
        value = value.float().numpy() if str(value.dtype) == "torch.bfloat16" else value.numpy()
    return np.asarray(value)


def _as_taken(taken: Input, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return `[rows, *shape]` in the input's dtype. Raises BadRow for a value that it can't hold, as for a column."""
    width = array.size // len(array) if len(array) else 1
    packed = len(taken.columns) if len(taken.columns) > 1 and array.ndim > 1 else 1

    def at(position: int, value: Any, what: str, advice: str) -> BadRow:
        row, column = position // width, taken.columns[position % packed]
        return BadRow(
            f"column {column!r} is {what} in row {row} (input {taken.name!r}). {advice.format(column)}.",
            reason=f"column {column!r} is {what.removesuffix(',')}",
            column=column,
            row_id=row,
            value=value,
            batch_column=taken.name,
        )

    raw, mean = array.reshape(-1), taken.codec.get("mean")
    dtype = np.dtype("float64" if mean else taken.dtype)
    integers = dtype.kind == "f" and not narrow.holds(dtype, raw.dtype)
    with advising():
        values = narrow.cast(raw, dtype, at)
        narrow.check(values, raw, at, keep=taken.codec.get("nan") == "keep", exact=(integers,))
    shaped: np.ndarray[Any, Any] = values.reshape(array.shape)
    return normalized(shaped, mean, taken.codec["std"]).astype(taken.dtype) if mean else shaped
