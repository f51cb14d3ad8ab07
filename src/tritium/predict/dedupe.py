"""`score_all`: score a DataFrame into a table, every row, or with `dedupe` equal inputs once (driver)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tritium.data.types import is_spark
from tritium.errors import BadData, BadSetting
from tritium.model.model import Model
from tritium.predict.fingerprints import quoted
from tritium.predict.into import Scored, Work, facts_of, refuse_unusable, score_into

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

INPUTS = "inputs"
"""The directory of different inputs with their predictions, below that of `resume`."""


def score_all(
    model: Model,
    transform: Callable[[DataFrame], DataFrame],
    df: Any,
    *,
    into: str,
    resume: str | None,
    on_error: str,
    settings: Mapping[str, Any],
    changed: str,
    dedupe: bool,
    verbose: bool,
) -> Scored:
    """Do as `TrainedModel.score`. `transform` adds the predictions to a DataFrame; `settings` are compared."""
    if not is_spark(df):
        raise BadData(
            f"score(into=…) takes a Spark DataFrame, and got a {type(df).__qualname__}: model.transform(data) adds "
            "the predictions to one of pandas."
        )
    work = Work(df, transform, {}, on_error, changed, verbose)
    refuse_unusable(work)
    facts = facts_of(model, df, transform(df), {**settings, "dedupe": dedupe})
    if not dedupe:
        return score_into(Work(df, transform, facts, on_error, changed, verbose), into, resume)
    if resume is None:
        raise BadSetting("dedupe=True keeps the scored inputs in resume=, which is not given.", setting="resume")
    columns = input_columns(model, df)
    inputs = df.select(columns).distinct()
    new = [name for name in transform(inputs).columns if name not in columns]
    if other := sorted({*transform(df).columns} - {*df.columns} - {*new}):
        raise BadSetting(f"dedupe=True: the column {other[0]!r} is made of others than the model's inputs.")
    work = Work(inputs, transform, facts_of(model, inputs, transform(inputs), settings), on_error, changed, verbose)
    folder = f"{resume.rstrip('/')}/{INPUTS}"
    first = score_into(work, f"parquet:{folder}/scored", folder)
    joined = _joined(df, df.sparkSession.read.parquet(f"{folder}/scored"), columns, new)
    second = score_into(Work(joined, lambda rows: rows, facts, on_error, changed, verbose), into, resume)
    return replace(second, scored=first.scored, seconds=first.seconds + second.seconds)


def input_columns(model: Model, df: DataFrame) -> list[str]:
    """Return the columns of `df` that the model's inputs are made of."""
    names = [name for one in model.signature.inputs for name in one.columns]
    tops = (name if name in df.columns else name.partition(".")[0] for name in names)
    return list(dict.fromkeys(tops))


def _joined(df: DataFrame, scored: DataFrame, columns: Sequence[str], new: Sequence[str]) -> DataFrame:
    """Return `df` with the `new` columns of the scored inputs; nulls are equal, and a row without them is left out."""
    from pyspark.sql import functions as F

    renamed = scored.select(
        *(F.col(quoted(name)).alias(f"_tritium_{number}") for number, name in enumerate(columns)),
        *(F.col(quoted(name)).alias(f"_tritium_new_{number}") for number, name in enumerate(new)),
    )
    equal = [F.col(quoted(name)).eqNullSafe(F.col(f"_tritium_{number}")) for number, name in enumerate(columns)]
    added = [F.col(f"_tritium_new_{number}").alias(name) for number, name in enumerate(new)]
    return df.join(renamed, equal, "inner").select(*(F.col(quoted(name)) for name in df.columns), *added)
