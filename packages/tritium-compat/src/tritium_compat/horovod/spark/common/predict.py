"""Predictions of a model as the columns that `horovod.spark` adds: numbers of the label's type, or vectors (driver)."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from tritium import Model
from tritium.errors import BadSetting
from tritium.integration.spark import score
from tritium_compat.horovod.spark.common.columns import Metadata


def output_name(number: int) -> str:
    """Return what the Model calls an output."""
    return f"output_{number}"


def predicted(model: Model, df: Any, labels: Sequence[str], names: Sequence[str], metadata: Metadata) -> Any:
    """Return the DataFrame with one column for each label. Raises BadSetting, a ValueError, for names that are taken.

    A label that is a vector, and an output of several numbers, give a vector; another label a number of its own type,
    rounded where that is an integer.
    """
    from pyspark.ml.functions import array_to_vector
    from pyspark.sql import functions as F

    if len(labels) != len(names):
        raise BadSetting("Number of output columns must equal to number of label columns.", setting="outputCols")
    taken = [name for name in names if name in df.columns]
    if taken:
        raise BadSetting(f"Output col '{taken[0]}' exists in original df schema: {set(df.columns)}")
    whole = f"_tritium_{uuid.uuid4().hex}"
    there = score(model, df, output_cols=[whole])
    outputs = {output.name: output for output in model.signature.outputs}
    columns = {}
    for number, (label, name) in enumerate(zip(labels, names, strict=True)):
        value = F.col(whole) if len(outputs) == 1 else F.col(whole).getField(output_name(number))
        one = (next(iter(outputs.values())) if len(outputs) == 1 else outputs[output_name(number)]).scalar
        kind = metadata[label]["spark_data_type"]
        if kind.__name__ in ("DenseVector", "SparseVector", "VectorUDT", "ArrayType"):
            columns[name] = array_to_vector(F.array(value.cast("double")) if one else value.cast("array<double>"))
        elif not one:
            columns[name] = array_to_vector(value.cast("array<double>"))
        elif kind.__name__ in ("ByteType", "ShortType", "IntegerType", "LongType"):
            columns[name] = F.bround(value.cast("double")).cast(kind())  # half to even, as Python's round
        else:
            columns[name] = value.cast(kind())
    return there.withColumns(columns).drop(whole)
