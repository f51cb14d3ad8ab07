"""`prepare_data` and its kin: a DataFrame as Parquet in the store, for those who train on that (driver)."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from pyspark.sql import functions as F

from tritium.errors import BadSetting
from tritium_compat.horovod.spark.common.columns import Metadata, check_columns, check_validation, metadata_of, split
from tritium_compat.horovod.spark.common.store import is_databricks

_lock = threading.Lock()
_prepared: dict[int, tuple[int, int, Metadata, float]] = {}
_in_use: set[tuple[str, int]] = set()


@contextlib.contextmanager
def prepare_data(
    num_processes: int,
    store: Any,
    df: Any,
    label_columns: Sequence[str],
    feature_columns: Sequence[str] | None = None,
    validation: float | str | None = None,
    sample_weight_col: str | None = None,
    compress_sparse: bool = False,
    partitions_per_process: int = 10,
    verbose: int = 0,
) -> Iterator[int]:
    """Write the columns to the store as Parquet, and give the number under which the store has them in the block.

    `store.get_train_data_path(number)` and `get_val_data_path(number)` are their paths, which
    `estimator.fit_on_parquet(dataset_idx=number)` reads. Vectors become arrays. `compress_sparse` does nothing.
    Raises ValueError for columns that are not there.
    """
    check_validation(validation, df)
    if num_processes <= 0 or partitions_per_process <= 0:
        raise BadSetting(
            f"num_proc={num_processes} and partitions_per_process={partitions_per_process} must both be > 0"
        )
    if not label_columns:
        raise BadSetting("Parameter label_columns cannot be None or empty")
    if feature_columns is None:
        taken = {*label_columns, sample_weight_col, validation}
        feature_columns = [name for name in df.columns if name not in taken]
    check_columns(df.columns, label_columns=label_columns, feature_columns=feature_columns)
    names = [*feature_columns, *label_columns, *([sample_weight_col] if sample_weight_col else [])]
    marks = [validation] if isinstance(validation, str) else []
    parts = split(_as_arrays(df.select(*dict.fromkeys([*names, *marks]))), validation, None)
    frame = parts["train"].frame
    if validation:
        frame = frame.persist()  # both parts are written from one evaluation: Spark may order another anew
    paths = store.get_train_data_path()
    with _lock:
        number = next(n for n in itertools.count() if (paths, n) not in _in_use)
        _in_use.add((paths, number))
    try:
        counts = []
        for name, path in (
            ("train", store.get_train_data_path(number)),
            ("validation", store.get_val_data_path(number)),
        ):
            if name in parts:
                where = parts[name].where
                rows = frame if where is None else frame.where(F.col(where[0]) == where[1])
                rows = rows.select(*(F.col(f"`{column}`") for column in dict.fromkeys(names)))
                rows.coalesce(num_processes * partitions_per_process).write.mode("overwrite").parquet(path)
                counts.append(df.sparkSession.read.parquet(path).count())
        train_rows, val_rows = [*counts, 0][:2]
        if "validation" in parts and not val_rows:
            raise BadSetting(f"Validation DataFrame is empty with validation param: {validation}")
        _prepared[number] = train_rows, val_rows, metadata_of(df.schema, names), 0.0
        yield number
    finally:
        if validation:
            frame.unpersist()
        with _lock:
            _in_use.discard((paths, number))


def _as_arrays(df: Any) -> Any:
    from pyspark.ml.functions import vector_to_array
    from pyspark.ml.linalg import VectorUDT
    from pyspark.sql import functions as F

    for field in df.schema.fields:
        if isinstance(field.dataType, VectorUDT):
            df = df.withColumn(field.name, vector_to_array(F.col(f"`{field.name}`")))
    return df


def get_dataset_properties(dataset_idx: int) -> tuple[int, int, Metadata, float]:
    """Return (rows to train on, rows to validate on, metadata, bytes of a row, which is 0) of what was prepared."""
    return _prepared[dataset_idx]


def get_simple_meta_from_parquet(
    store: Any,
    label_columns: Sequence[str],
    feature_columns: Sequence[str],
    sample_weight_col: str | None = None,
    dataset_idx: int | None = None,
) -> tuple[int, int, Metadata, float]:
    """Return (rows to train on, rows to validate on, metadata, bytes of a row, which is 0) of Parquet in the store."""
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.getOrCreate()
    train, validation = store.get_train_data_path(dataset_idx), store.get_val_data_path(dataset_idx)
    there = spark.read.parquet(train)
    names = [*feature_columns, *label_columns, *([sample_weight_col] if sample_weight_col else [])]
    check_columns(there.columns, columns=names)
    val_rows = spark.read.parquet(validation).count() if store.exists(validation) else 0
    return there.count(), val_rows, metadata_of(there.schema, names), 0.0


def clear_training_cache() -> None:
    """Forget what was prepared."""
    _prepared.clear()


def to_list(var: Any, length: int) -> list[Any] | None:
    """Return a list of this length: of one value so many times. Raises ValueError for a list of another length."""
    if var is None:
        return None
    found = list(var) if isinstance(var, list) else [var]
    if len(found) == 1:
        return found * length
    if len(found) != length:
        raise ValueError(f"List {found} must be length {length} (found: {len(found)})")
    return found


__all__ = [
    "check_validation",
    "clear_training_cache",
    "get_dataset_properties",
    "get_simple_meta_from_parquet",
    "is_databricks",
    "prepare_data",
    "to_list",
]
