"""`score_pandas`: a model's predictions as columns of a pandas DataFrame, without a Spark job (driver)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tritium.errors import BadData
from tritium.model.bad_rows import OnError
from tritium.model.calls import BatchSize, Computing
from tritium.model.model import Model
from tritium.model.score import words_of
from tritium.predict.following import Followed
from tritium.predict.spark import VERSION, ClassColumns, output_names, refuse_taken


def score_pandas(
    model: Model,
    frame: Any,
    *,
    output_cols: Sequence[str] | None = None,
    class_cols: ClassColumns | None = None,
    batch_size: BatchSize = 1024,
    device: str = "cpu",
    on_error: OnError = "fail",
    error_col: str = "prediction_error",
    computes: Computing | None = None,
    followed: Followed | None = None,
) -> Any:
    """Return a copy of the pandas DataFrame `frame` with the columns that `score` adds, as `toPandas` returns them.

    A classification's probabilities are ml vectors, other arrays are NumPy arrays, and several outputs under one name
    are dicts. Raises BadData where `frame` is no pandas DataFrame, and the errors of `Model.predict`.
    """
    number, model = (0, model) if followed is None else followed.newest() or (0, model)
    names = output_names(model.signature, output_cols)
    kind = type(frame)
    if kind.__module__.partition(".")[0] != "pandas" or kind.__name__ != "DataFrame":
        raise BadData(
            f"transform takes a Spark or a pandas DataFrame, and got a {kind.__module__}.{kind.__qualname__}. For "
            "Arrow tables, NumPy arrays and tensors there is model.model.predict(data); a pandas-on-Spark frame gives "
            "its Spark DataFrame by to_spark()."
        )
    columns_before = [str(name) for name in frame.columns]
    more = (class_cols or ClassColumns()).of(model.signature, columns_before)
    errors = [error_col] if on_error == "column" else []
    refuse_taken([*names, *more.values(), *errors, *([VERSION] if followed else [])], columns_before)
    predictions, bad = model.predict_valid(
        frame, batch_size=batch_size, device=device, on_error=on_error, computes=computes
    )
    valid = bad.valid
    skips = valid is not None and on_error == "skip"
    added = frame[valid].copy() if skips else frame.copy(deep=False)
    columns = dict(zip(names, _columns(model, predictions, len(names)), strict=True))
    label_index = more.pop("label_index", None)
    columns |= {name: _of_classes(model, predictions, field) for field, name in more.items()}
    for name, values in columns.items():
        added[name] = values if valid is None or skips else _with_nulls(values, valid)
    for name in errors:
        added[name] = np.array([bad.reasons.get(row) for row in range(len(frame))], np.object_)
    if label_index is not None:
        column, words = next(iter(model.signature.label_words.items()))
        index = {word: float(number) for number, word in enumerate(words)}
        added[label_index] = [
            None if missing else index.get(word, float(len(words)))
            for word, missing in zip(added[column], added[column].isna(), strict=True)
        ]
    if followed is not None:
        added[VERSION] = number
    return added


def _with_nulls(values: Any, valid: np.ndarray[Any, Any]) -> Any:
    """Return the values of the valid rows at their places among all rows: NaN between numbers, else None."""
    if isinstance(values, np.ndarray) and values.dtype == np.float64:
        numbers = np.full(len(valid), np.nan)
        numbers[valid] = values
        return numbers
    values_left = iter(values)
    return [next(values_left) if is_valid else None for is_valid in valid]


def _columns(model: Model, predictions: Any, count: int) -> list[Any]:
    """Return the values of the new columns, in the order of their names."""
    if model.signature.task == "classification":
        from pyspark.ml.linalg import Vectors

        return [predictions["prediction"], [Vectors.dense(row) for row in predictions["probability"]]][:count]
    if len(model.signature.outputs) == 1:
        return [_rows(predictions["prediction"])]
    parts = [_rows(predictions[output.name]) for output in model.signature.outputs]
    if count == len(parts):
        return parts
    names = [output.name for output in model.signature.outputs]
    return [[dict(zip(names, row, strict=True)) for row in zip(*parts, strict=True)]]


def _of_classes(model: Model, predictions: Any, field: str) -> Any:
    """Return the values of a field of `ClassColumns`."""
    if field == "word":
        return words_of(model.signature, predictions["prediction"])
    from pyspark.ml.linalg import Vectors

    with np.errstate(divide="ignore"):  # The logarithm of 0 is -Infinity, as it should be.
        return [Vectors.dense(row) for row in np.log(predictions["probability"])]


def _rows(values: np.ndarray[Any, Any]) -> Any:
    """Return one value per row: a number, or an array in an object column."""
    return values if values.ndim == 1 else list(values)
