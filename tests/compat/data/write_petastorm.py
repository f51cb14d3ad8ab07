"""Writes the data set beside it, by Petastorm itself: `python write_petastorm.py` with petastorm 0.13.1, pyspark 3.5.8,
pyarrow 14.0.2, numpy 1.26.4, pandas 2.2.3, opencv-python-headless 4.10.0.84 (`scripts/peers.sh petastorm` and OpenCV).

`rows()` is also what the tests expect to read, and `schema` what they write themselves: it takes the modules of
whichever Petastorm there is.
"""

from __future__ import annotations

import datetime
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

ROWS = 6
DIRECTORY = Path(__file__).with_name("petastorm")


def schema(codecs: Any, unischema: Any) -> Any:
    """Return a field of each codec and type."""
    from pyspark.sql import types

    scalar, field = codecs.ScalarCodec, unischema.UnischemaField
    return unischema.Unischema(
        "Everything",
        [
            field("id", np.int32, (), scalar(types.IntegerType()), False),
            field("long_or_none", np.int64, (), scalar(types.LongType()), True),
            field("uint16", np.uint16, (), scalar(types.IntegerType()), False),
            field("float", np.float32, (), scalar(types.FloatType()), False),
            field("flag", np.bool_, (), scalar(types.BooleanType()), False),
            field("text_or_none", np.str_, (), scalar(types.StringType()), True),
            field("decimal", Decimal, (), scalar(types.DecimalType(10, 3)), False),
            field("time", np.datetime64, (), scalar(types.TimestampType()), False),
            field("plain", np.int32, (), None, False),
            field("matrix", np.float32, (3, None), codecs.NdarrayCodec(), False),
            field("array_or_none", np.int64, (2,), codecs.NdarrayCodec(), True),
            field("compressed", np.uint8, (4, 5), codecs.CompressedNdarrayCodec(), False),
            field("png", np.uint8, (6, 7, 3), codecs.CompressedImageCodec("png"), False),
            field("grey16", np.uint16, (6, 7), codecs.CompressedImageCodec("png"), False),
            field("jpeg", np.uint8, (16, 24, 3), codecs.CompressedImageCodec("jpeg", 90), False),
        ],
    )


def rows(count: int = ROWS) -> list[dict[str, Any]]:
    """Return the rows."""
    return [_row(number) for number in range(count)]


def _row(number: int) -> dict[str, Any]:
    random = np.random.RandomState(number)
    return {
        "id": np.int32(number),
        "long_or_none": None if number % 3 == 0 else np.int64(number * 10**12),
        "uint16": np.uint16(60000 + number),
        "float": np.float32(number / 3),
        "flag": np.bool_(number % 2),
        "text_or_none": None if number % 2 else f"text {number} é",
        "decimal": Decimal(number) / Decimal(8),
        "time": datetime.datetime(2020, 1, 1, number, 2, 3, 456),
        "plain": np.int32(number),
        "matrix": random.rand(3, number % 4 + 1).astype(np.float32),
        "array_or_none": None if number % 5 == 0 else np.array([number, number + 1]),
        "compressed": random.randint(0, 255, (4, 5)).astype(np.uint8),
        "png": random.randint(0, 255, (6, 7, 3)).astype(np.uint8),
        "grey16": random.randint(0, 65535, (6, 7)).astype(np.uint16),
        "jpeg": np.kron(random.randint(0, 255, (2, 3, 3)), np.ones((8, 8, 1))).astype(np.uint8),
    }


def write(spark: Any, url: str, petastorm: Any) -> None:
    """Write the rows to a directory, as Petastorm's users do."""
    described = schema(petastorm.codecs, petastorm.unischema)
    with petastorm.etl.dataset_metadata.materialize_dataset(spark, url, described, 1):
        encoded = [petastorm.unischema.dict_to_spark_row(described, row) for row in rows()]
        spark.createDataFrame(encoded, described.as_spark_schema()).repartition(2, "id").write.parquet(url)


if __name__ == "__main__":
    import petastorm.codecs
    import petastorm.etl.dataset_metadata
    import petastorm.unischema
    from pyspark.sql import SparkSession

    settings = {"spark.ui.enabled": "false", "spark.sql.session.timeZone": "UTC"}
    builder = SparkSession.builder.master("local[1]").config(map=settings)
    write(builder.getOrCreate(), f"file://{sys.argv[1] if sys.argv[1:] else DIRECTORY}", petastorm)
    for checksum in DIRECTORY.glob(".*.crc"):
        checksum.unlink()
