"""Learns the means and standard deviations of features from the rows to train on (driver)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from tritium.data.codec import read
from tritium.data.exchange import pack
from tritium.data.receiver import readable
from tritium.data.schema import Field
from tritium.data.tables import Tables
from tritium.data.types import is_spark
from tritium.errors import BadData
from tritium.hints import suggest
from tritium.ml.columns import Columns, names_in
from tritium.ml.settings import Settings

Moments = dict[str, tuple[list[float], list[float]]]
"""Batch column → mean and standard deviation of each value of a row."""
_GRID = 1 << 20


def with_means(frame: Any, settings: Settings, columns: Columns) -> Columns:
    """Return `columns` with the means and deviations of the features to normalise, learnt over the rows of `frame`.

    They are of the values as the model would get them: nulls are filled, and NaN and infinity do not count. A feature
    that is constant has the deviation 1. Raises BadData for a column that can't be normalised.
    """
    asked = settings.normalize
    if not asked or isinstance(asked, Mapping):
        return columns
    fields = {field.name: field for field in columns.fields(frame, "train") if field.name in settings.inputs()}
    names = None if asked is True else set(names_in(asked))
    if problems := list(_problems(fields, names, settings)):
        listed = "".join(f"\n  - {problem}" for problem in problems)
        raise BadData(f"normalize={asked!r} can't be done:{listed}", problems=problems)
    chosen = {
        name: dataclasses.replace(field, dtype="float64", travel="float64", exact=())
        for name, field in fields.items()
        if _floating(field) and (names is None or names & set(field.sources))
    }
    if not chosen:
        return columns
    moments = _of_spark(frame, chosen) if is_spark(frame) else _of_table(frame, chosen, columns, settings)
    learnt: dict[str, tuple[Any, Any]] = {}
    for name, field in chosen.items():
        mean, std = _rounded(*moments[name])
        if field.packed and names is not None:
            others = [source not in names for source in field.sources]
            mean = [0.0 if other else one for one, other in zip(mean, others, strict=True)]
            std = [1.0 if other else one for one, other in zip(std, others, strict=True)]
        learnt[name] = (mean, std)
    return dataclasses.replace(columns, values={**columns.values, "normalize": learnt})


def _floating(field: Field) -> bool:
    return field.kind == "fixed" and field.dtype.startswith("float") and field.vocabulary is None and field.pad is None


def _problems(fields: Mapping[str, Field], names: set[str] | None, settings: Settings) -> Iterator[str]:
    sources: dict[str, list[Field]] = {}
    for field in fields.values():
        for source in field.sources:
            sources.setdefault(source, []).append(field)
    for field in fields.values():
        if field.name in sources and field.sources != (field.name,):
            yield f"input {field.name!r} has the name of a column that is another input. Give it another name."
    for name in sorted(names or ()):
        if name not in sources:
            yield f"{name!r} is no feature.{suggest(name, sources)}"
        elif not any(map(_floating, sources[name])):
            field = sources[name][0]
            what = "is padded" if field.pad else "is an index" if field.vocabulary else f"is {field.dtype}, an index"
            what = "is decoded" if field.kind == "bytes" else what
            yield (
                f"{name!r} {what} or the like, and only floating numbers are normalised. Leave it out; a column of "
                f"integers is floating in a list: feature_cols={{{field.name!r}: [{name!r}]}}."
            )
    if names is None and not any(map(_floating, fields.values())):
        yield "no feature is a floating number."


def _rounded(mean: Sequence[Any], std: Sequence[Any]) -> tuple[list[float], list[float]]:
    """Return both with some 6 digits less than float64 has.

    Spark may add the same rows in another order, and gets other last digits. Rows must be normalised to the same
    numbers all the same, so that a later fit finds the checkpoint of an earlier one to be of its rows.
    """
    deviations = [float(np.float32(one)) if one and math.isfinite(one) else 1.0 for one in std]
    deviations = [one if one > 0 else 1.0 for one in deviations]
    pairs = zip(mean, deviations, strict=True)
    return [round((m or 0.0) / s * _GRID) / _GRID * s for m, s in pairs], deviations


def _of_spark(frame: Any, fields: Mapping[str, Field]) -> Moments:
    """Return the moments by one job over the scalars, and one over the arrays."""
    from pyspark.sql import functions as F

    def number(value: Any, fill: Any) -> Any:
        value = value if fill is None else F.coalesce(value, F.lit(float(fill)))
        return F.when(F.abs(value) < float("inf"), value)  # NaN is larger to Spark

    packed = {name: pack(field, frame.schema) for name, field in fields.items()}
    scalars: dict[tuple[str, int], Any] = {}
    arrays = []
    for number_of_field, (name, field) in enumerate(fields.items()):
        if field.packed:
            scalars |= {
                (name, i): number(packed[name][i], fill)
                for i, fill in zip(range(len(field.sources)), field.nulls, strict=True)
            }
        elif field.depth == 0:
            scalars[name, 0] = number(packed[name].cast("double"), field.nulls[0])
        else:
            flat = packed[name]
            for _ in range(field.depth - 1):
                flat = F.flatten(flat)
            arrays.append(_numbered(number_of_field, flat))
    by_name: dict[str, dict[int, tuple[Any, Any]]] = {name: {} for name in fields}
    if scalars:
        moments = [part for value in scalars.values() for part in (F.avg(value), F.stddev_pop(value))]
        row = frame.select(*(moment.alias(f"m{i}") for i, moment in enumerate(moments))).collect()[0]
        for place, (name, i) in enumerate(scalars):
            by_name[name][i] = row[2 * place], row[2 * place + 1]
    if arrays:
        numbers = frame.select(F.explode(F.concat(*(F.coalesce(array, F.array()) for array in arrays))).alias("v"))
        value = F.when(F.abs(F.col("v.x")) < float("inf"), F.col("v.x"))
        groups = numbers.groupBy("v.c", "v.i").agg(F.avg(value).alias("mean"), F.stddev_pop(value).alias("std"))
        names = list(fields)
        for row in groups.collect():
            by_name[names[row["c"]]][row["i"]] = row["mean"], row["std"]
    return {name: _in_order(parts) for name, parts in by_name.items()}


def _numbered(number: int, values: Any) -> Any:
    """Return an array of this number, the index of a value, and the value."""
    from pyspark.sql import functions as F

    return F.transform(
        values, lambda x, i: F.struct(F.lit(number).alias("c"), i.alias("i"), x.cast("double").alias("x"))
    )


def _in_order(parts: Mapping[int, tuple[Any, Any]]) -> tuple[list[Any], list[Any]]:
    pairs = [parts[i] for i in sorted(parts)] or [(None, None)]  # Without rows, which is an error later.
    return [mean for mean, _ in pairs], [std for _, std in pairs]


def _of_table(table: Any, fields: Mapping[str, Field], columns: Columns, settings: Settings) -> Moments:
    parts: dict[str, list[np.ndarray[Any, Any]]] = {name: [] for name in fields}
    # Rows that can't be read do not count: the ranks leave them out, or tell the user which they are.
    values, dtypes = (
        {**columns.values, "on_error": "skip"},
        {**columns.dtypes, **dict.fromkeys(fields, "float64")},
    )
    tables = Tables({"train": dataclasses.replace(columns, dtypes=dtypes, values=values).data(table, settings)}, 1)
    known = list(tables.plan["train"])
    places = {field.name: place for place, field in enumerate(known)}
    for batch in tables.batches(0):
        struct = batch.column(2).drop_null()
        ids, arrays = batch.column(0).to_numpy()[: len(struct)], struct.flatten()
        kept, known = readable(known, arrays, ids)
        for name in fields if len(kept) else ():
            place = places[name]
            rows = read(known[place], arrays[place].take(pa.array(kept)), ids[kept])[0]
            assert isinstance(rows, np.ndarray)
            parts[name].append(rows.reshape(len(rows), -1))
    moments: Moments = {}
    for name, pieces in parts.items():
        rows = np.concatenate(pieces) if pieces else np.zeros((0, 1))
        rows = np.where(np.isfinite(rows), rows, np.nan)
        counts = np.maximum(np.isfinite(rows).sum(axis=0), 1)
        mean = np.nansum(rows, axis=0) / counts
        moments[name] = mean.tolist(), np.sqrt(np.nansum((rows - mean) ** 2, axis=0) / counts).tolist()
    return moments
