"""The columns of a DataFrame as `horovod.spark` describes them, and which rows validate (driver)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyspark.ml.linalg import DenseVector, VectorUDT
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, BooleanType

from tritium import Data
from tritium.errors import BadData, BadSetting
from tritium.integration import suggest
from tritium.integration.spark import drawn

_HELD = "_validation"
Metadata = dict[str, dict[str, Any]]


def metadata_of(schema: Any, names: Sequence[str]) -> Metadata:
    """Return the type of each column, as models keep it: {"x": {"spark_data_type": DenseVector, …}}."""
    found = {}
    for name in names:
        kind = schema[name].dataType
        vector = isinstance(kind, VectorUDT | ArrayType)
        found[name] = {
            "spark_data_type": DenseVector if vector else type(kind),
            "is_sparse_vector_only": False,
            "shape": None if vector else 1,
            "intermediate_format": "array" if isinstance(kind, VectorUDT) else "nochange",
            "max_size": None if vector else 1,
        }
    return found


def check_columns(there: Sequence[str], **asked: Sequence[str] | str | None) -> None:
    """Raise BadData, which is a ValueError, for columns that the DataFrame has not: feature_cols=[…]."""
    for setting, names in asked.items():
        listed = [names] if isinstance(names, str) else names or []
        for name in listed:
            if name not in there:
                raise BadData(f"{setting}: the DataFrame has no column {name!r}.{suggest(name, there)}", column=name)


def check_validation(validation: Any, df: Any = None) -> None:
    """Raise BadSetting, which is a ValueError, unless it is a fraction from 0 up to 1, or a column."""
    if not validation:
        return
    if isinstance(validation, str):
        if df is not None and validation not in df.columns:
            raise BadSetting(f"Validation column {validation} does not exist in the DataFrame", setting="validation")
    elif not isinstance(validation, float):
        raise BadSetting(
            f'Param validation must be of type "float" or "str", found: {type(validation)}', setting="validation"
        )
    elif not 0 <= validation < 1:
        raise BadSetting(f"Validation split {validation} must be in the range: [0, 1)", setting="validation")


def split(df: Any, validation: Any, seed: int | None) -> dict[str, Data]:
    """Return the rows to train on as "train", and as "validation" those to validate on where there are any.

    For a fraction each row is drawn on its own, by the seed. A column's rows that are neither are in neither.
    """
    if not validation:
        return {"train": Data(df)}
    if isinstance(validation, str):
        mark = F.col(f"`{validation}`")
        boolean = isinstance(df.schema[validation].dataType, BooleanType)
        held = mark if boolean else mark > 0
        df = df.where(mark.isNotNull() if boolean else mark >= 0)
    else:
        held = drawn(validation, seed or 0)
    df = df.withColumn(_HELD, held)
    return {name: Data(df, where=(_HELD, name != "train")) for name in ("train", "validation")}
