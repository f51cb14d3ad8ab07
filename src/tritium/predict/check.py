"""Counts rows that are unlike those of the training, in the pass that scores (driver)."""

from __future__ import annotations

import threading
import uuid
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tritium.data.types import columns_of, spark_column
from tritium.errors import BadSetting, TritiumWarning
from tritium.model.ranges import bounds_of, table_of_inputs
from tritium.model.signature import Signature
from tritium.spark import is_connect
from tritium.spark.progress import on_micro_batch

_MOST_WORDS = 10_000  # Words of a vocabulary that Spark is given to compare with.
_MORE_NULLS = 0.01
_NULLS, _OUTSIDE, _UNKNOWN = "nulls", "outside", "unknown"


@dataclass(frozen=True)
class Checks:
    """How many of the rows that were scored are unlike those of the training; `str()` says it in words.

    rows    : that were scored.
    nulls   : column → rows with a null. outside : column → rows with a number outside the range of the training.
    unknown : column → rows with a word that is not in the vocabulary.
    """

    rows: int
    nulls: dict[str, int]
    outside: dict[str, int]
    unknown: dict[str, int]
    signature: Signature = field(repr=False)

    def __str__(self) -> str:
        lines = self.problems()
        return f"{self.rows:,} rows scored: " + ("; ".join(lines) if lines else "all as at the training") + "."

    def problems(self) -> list[str]:
        """Return a clause for each column that is unlike the training's."""
        return list(self.problem_of().values())

    def problem_of(self) -> dict[tuple[str, str], str]:
        """Return the clauses: what is counted, and of which column → the clause."""
        clauses = {}
        for column, count in self.outside.items():
            if count:
                low, high = self.signature.ranges[column]["range"]
                clauses[_OUTSIDE, column] = f"{column!r} is outside {low:g} to {high:g} in {self._share(count)}"
        for column, count in self.unknown.items():
            if count:
                share = self._share(count)
                clauses[_UNKNOWN, column] = f"{column!r} has a word that the training did not have in {share}"
        for column, count in self.nulls.items():
            before = float(self.signature.ranges.get(column, {}).get("nulls", 0.0))
            if count and (not before or count / self.rows > before + _MORE_NULLS):
                clauses[_NULLS, column] = f"{column!r} is null in {self._share(count)}, and was in {before:.1%}"
        return clauses

    def _share(self, count: int) -> str:
        return f"{count:,} ({count / max(1, self.rows):.1%})"


def check_check(value: str) -> None:
    """Raise BadSetting unless it is "off", "count" or "warn"."""
    if value not in ("off", "count", "warn"):
        raise BadSetting(
            f"check={value!r}: rows unlike those of the training are not looked for ('off'), counted ('count'), or "
            "counted and warned of ('warn').",
            setting="check",
        )


def observed(signature: Signature, df: Any, check: str) -> tuple[Any, Any]:
    """Return Spark's DataFrame, counting as it is computed, and an Observation or, of a stream, the metrics' name."""
    from pyspark.sql import Observation
    from pyspark.sql import functions as F

    _refuse_without(signature)
    counts = [F.count(F.lit(1)).alias("rows")]
    for kind, name, i in _measured(signature):
        column = spark_column(df.schema, name)
        if kind == _NULLS:
            unlike = column.isNull()
        elif kind == _UNKNOWN:
            words = _vocabularies(signature)[name]
            is_array = columns_of(df.schema)[name].name == "array"
            unlike = F.exists(column, lambda x: ~x.isin(words)) if is_array else ~column.isin(words)  # noqa: B023
        else:
            bounds, (low, high) = bounds_of(df.schema, name), signature.ranges[name]["range"]
            if bounds is None:
                continue
            unlike = (bounds[0] < low) | (bounds[1] > high)
        counts.append(F.count_if(unlike).alias(f"{kind}_{i}"))
    name = f"tritium_check_{uuid.uuid4().hex[:8]}"
    if check == "warn" and is_connect(df.sparkSession):
        raise BadSetting("Over Spark Connect check='warn' can't be: take 'count', and model.checks().")
    if df.isStreaming:
        if check == "warn":
            on_micro_batch(df.sparkSession, name, _OfStream(signature).warn)
        return df.observe(name, *counts), name
    observation = Observation(name)
    counting = df.observe(observation, *counts)
    if check == "warn":
        # It waits in the JVM for the first action, and does not hold up the end of the process.
        threading.Thread(
            target=_warn_when_done, args=(signature, observation), name="tritium-check", daemon=True
        ).start()
    return counting, observation


class _OfStream:
    """What was warned of in a stream: each column once, not in every micro-batch."""

    def __init__(self, signature: Signature) -> None:
        self._signature = signature
        self._warned: set[tuple[str, str]] = set()

    def warn(self, progress: Any, counts: Mapping[str, Any]) -> None:
        """Warn of the columns that are unlike those of the training for the first time."""
        checks = checks_of(self._signature, counts)
        new = {key: clause for key, clause in checks.problem_of().items() if key not in self._warned}
        if new:
            self._warned.update(new)
            text = f"Micro-batch {progress.batchId}, {checks.rows:,} rows scored: {'; '.join(new.values())}."
            warnings.warn(f"{text} checks(query) counts those of later ones.", TritiumWarning, stacklevel=2)


def _warn_when_done(signature: Signature, observation: Any) -> None:
    warn(checks_of(signature, observation.get))


def warn(checks: Checks) -> None:
    """Warn of rows unlike those of the training, where there are any."""
    if checks.problems():
        warnings.warn(str(checks), TritiumWarning, stacklevel=2)


def of_query(signature: Signature, query: Any, name: str) -> Checks:
    """Return the sums over the micro-batches of a streaming query that it still knows (`recentProgress`)."""
    sums: dict[str, int] = {}
    for progress in query.recentProgress:
        metrics = dict(progress.get("observedMetrics") or {}).get(name) or {}
        metrics = metrics.asDict() if hasattr(metrics, "asDict") else metrics
        for key, value in metrics.items():
            sums[key] = sums.get(key, 0) + int(value)
    return checks_of(signature, sums)


def checks_of(signature: Signature, counts: Mapping[str, Any]) -> Checks:
    """Return the counts of an observation, by column."""
    by_kind: dict[str, dict[str, int]] = {_NULLS: {}, _OUTSIDE: {}, _UNKNOWN: {}}
    for kind, name, i in _measured(signature):
        if f"{kind}_{i}" in counts:
            by_kind[kind][name] = int(counts[f"{kind}_{i}"])
    return Checks(int(counts.get("rows", 0)), by_kind[_NULLS], by_kind[_OUTSIDE], by_kind[_UNKNOWN], signature)


def of_table(signature: Signature, frame: Any) -> Checks:
    """Return the counts of a pandas DataFrame."""
    _refuse_without(signature)
    table = table_of_inputs(signature, frame)
    counts: dict[str, int] = {"rows": len(table)}
    for kind, name, i in _measured(signature):
        column = table.column(name)
        if kind == _NULLS:
            count = column.null_count
        elif kind == _UNKNOWN:
            words = set(_vocabularies(signature)[name])
            rows = (row if isinstance(row, list) else [row] for row in column.drop_null().to_pylist())
            count = sum(not words.issuperset(row) for row in rows)
        else:
            low, high = signature.ranges[name]["range"]
            rows = (row if isinstance(row, list) else [row] for row in column.drop_null().to_pylist())
            count = sum(any(not low <= number <= high for number in row if number is not None) for row in rows)
        counts[f"{kind}_{i}"] = count
    return checks_of(signature, counts)


def _measured(signature: Signature) -> list[tuple[str, str, int]]:
    """Return (kind, column, number of the column) of every count."""
    numbered = list(enumerate(signature.columns))
    vocabularies = _vocabularies(signature)
    return [
        *((_NULLS, name, i) for i, name in numbered),
        *((_OUTSIDE, name, i) for i, name in numbered if "range" in signature.ranges.get(name, {})),
        *((_UNKNOWN, name, i) for i, name in numbered if name in vocabularies),
    ]


def _vocabularies(signature: Signature) -> dict[str, list[str]]:
    words = {i.columns[0]: list(i.codec.get("vocabulary") or ()) for i in signature.inputs}
    return {name: known for name, known in words.items() if 0 < len(known) <= _MOST_WORDS}


def _refuse_without(signature: Signature) -> None:
    if not signature.ranges and not _vocabularies(signature):
        raise BadSetting(
            "The model does not know the ranges of its training's data: model.learn_ranges(train_df), before it is "
            "saved, learns them in one job.",
            setting="check",
        )
