"""The types of source columns, the same for Spark and for Arrow (any process)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa

Name = Literal[
    "number", "decimal", "date", "timestamp", "string", "binary", "array", "vector", "image", "struct", "other"
]


@dataclass(frozen=True)
class SourceType:
    """The type of a source column."""

    name: Name
    text: str
    """The type as its engine spells it, for messages."""
    dtype: str = ""
    """The numpy dtype that holds it without loss; "" if there is none."""
    precision: int = 0
    """All digits of a decimal."""
    scale: int = 0
    """The digits of a decimal after the point."""
    zoned: bool = True
    """False for a timestamp without a time zone."""
    item: SourceType | None = None
    width: int | None = None
    """The length of an array whose type fixes it (Arrow's fixed_size_list)."""
    children: tuple[tuple[str, SourceType], ...] = ()

    @property
    def scalar(self) -> bool:
        """Whether it becomes one number per row without a vocabulary."""
        return self.name in ("number", "decimal", "date", "timestamp")

    def leaf(self) -> tuple[SourceType, int]:
        """Return the innermost type of nested arrays, and how many arrays are around it."""
        kind, depth = self, 0
        while kind.item is not None:
            kind, depth = kind.item, depth + 1
        return kind, depth


# Spark's struct of an image, as spark.read.format("image") makes it.
_IMAGE = {
    "origin": "string",
    "height": "number",
    "width": "number",
    "nChannels": "number",
    "mode": "number",
    "data": "binary",
}
IMAGE_SIZE = ("height", "width", "nChannels", "mode")
"""The fields of an image that describe its bytes."""


def _struct(text: str, children: tuple[tuple[str, SourceType], ...]) -> SourceType:
    """Return the type of a struct: an image if its fields are those of `_IMAGE`."""
    is_image = {name: kind.name for name, kind in children} == _IMAGE
    return (
        SourceType("image", "image", children=children) if is_image else SourceType("struct", text, children=children)
    )


_INT64_DIGITS = 18
"""Any integer of so many digits fits into int64."""
_SPARK_NUMBERS = {
    "ByteType": "int8",
    "ShortType": "int16",
    "IntegerType": "int32",
    "LongType": "int64",
    "FloatType": "float32",
    "DoubleType": "float64",
    "BooleanType": "bool",
}


def from_spark(spark: Any) -> SourceType:
    """Return the SourceType of a pyspark DataType (pyspark itself is not imported)."""
    kind, text = type(spark).__name__, spark.simpleString()
    if kind in _SPARK_NUMBERS:
        return SourceType("number", text, _SPARK_NUMBERS[kind])
    if kind == "DecimalType":
        return SourceType("decimal", text, "float64", precision=spark.precision, scale=spark.scale)
    if kind == "DateType":
        return SourceType("date", text, "int32")
    if kind in ("TimestampType", "TimestampNTZType"):
        return SourceType("timestamp", text, "int64", zoned=kind == "TimestampType")
    if kind in ("StringType", "CharType", "VarcharType"):
        return SourceType("string", text)
    if kind == "BinaryType":
        return SourceType("binary", text)
    if kind == "VectorUDT":
        return SourceType("vector", "vector", "float64", item=SourceType("number", "double", "float64"))
    if kind == "ArrayType":
        return SourceType("array", text, item=from_spark(spark.elementType))
    if kind == "StructType":
        return _struct(text, tuple((f.name, from_spark(f.dataType)) for f in spark.fields))
    return SourceType("other", text)


def dtype_of(arrow: pa.DataType) -> np.dtype[Any]:
    """Return the NumPy dtype of an Arrow type of numbers or truth values. Arrow's own way needs pandas for it."""
    name = str(arrow)
    return np.dtype({"halffloat": "float16", "float": "float32", "double": "float64"}.get(name, name))


def from_arrow(arrow: pa.DataType) -> SourceType:
    """Return the SourceType of an Arrow type."""
    text = str(arrow)
    if pa.types.is_dictionary(arrow):
        return from_arrow(arrow.value_type)
    if pa.types.is_boolean(arrow) or pa.types.is_integer(arrow) or pa.types.is_floating(arrow):
        return SourceType("number", text, dtype_of(arrow).name)
    if pa.types.is_decimal(arrow):
        return SourceType("decimal", text, "float64", precision=arrow.precision, scale=arrow.scale)
    if pa.types.is_date(arrow):
        return SourceType("date", text, "int32")
    if pa.types.is_timestamp(arrow):
        return SourceType("timestamp", text, "int64", zoned=arrow.tz is not None)
    if pa.types.is_string(arrow) or pa.types.is_large_string(arrow):
        return SourceType("string", text)
    if pa.types.is_binary(arrow) or pa.types.is_large_binary(arrow) or pa.types.is_fixed_size_binary(arrow):
        return SourceType("binary", text)
    if pa.types.is_fixed_size_list(arrow):
        return SourceType("array", text, item=from_arrow(arrow.value_type), width=arrow.list_size)
    if pa.types.is_list(arrow) or pa.types.is_large_list(arrow):
        return SourceType("array", text, item=from_arrow(arrow.value_type))
    if pa.types.is_struct(arrow):
        fields = [arrow.field(i) for i in range(arrow.num_fields)]
        return _struct(text, tuple((f.name, from_arrow(f.type)) for f in fields))
    return SourceType("other", text)


def columns_of(schema: Any) -> dict[str, SourceType]:
    """Return the columns of a pyspark StructType or pyarrow Schema by name, fields of structs by dotted names too."""
    return {name: kind for name, (kind, _) in _walk(schema).items()}


def path_of(schema: Any, name: str) -> tuple[str, ...]:
    """Return the column and the struct fields below it that a (dotted) name stands for."""
    return _walk(schema)[name][1]


def may_exceed_int64(kind: SourceType) -> bool:
    """Return whether a scalar of this type may be NaN, infinite, or a number beyond int64."""
    return (kind.name == "number" and kind.dtype.startswith("float")) or (
        kind.name == "decimal" and kind.precision - kind.scale > _INT64_DIGITS
    )


def flat(columns: dict[str, SourceType], name: str) -> list[str]:
    """Return `[name]`, or for a struct the dotted names of all its innermost fields."""
    if columns[name].name != "struct":
        return [name]
    return [leaf for child, _ in columns[name].children for leaf in flat(columns, f"{name}.{child}")]


def _walk(schema: Any) -> dict[str, tuple[SourceType, tuple[str, ...]]]:
    if isinstance(schema, pa.Schema):
        top = [(name, from_arrow(kind)) for name, kind in zip(schema.names, schema.types, strict=True)]
    else:
        top = [(field.name, from_spark(field.dataType)) for field in schema.fields]
    # A column called "a.b" takes precedence over field b of struct a.
    columns: dict[str, tuple[SourceType, tuple[str, ...]]] = {name: (kind, (name,)) for name, kind in top}
    for name, kind in top:
        _below(columns, kind, (name,))
    return columns


def _below(columns: dict[str, tuple[SourceType, tuple[str, ...]]], kind: SourceType, path: tuple[str, ...]) -> None:
    for child, inner in kind.children:
        columns.setdefault(".".join((*path, child)), (inner, (*path, child)))
        _below(columns, inner, (*path, child))


def is_spark(frame: Any) -> bool:
    """Return whether `frame` is a Spark DataFrame, classic or Connect."""
    return hasattr(frame, "sparkSession")


def spark_column(schema: Any, name: str) -> Any:
    """Return a column of Spark DataFrames with this schema, also a nested one: `address.zip`."""
    from pyspark.sql import functions as F

    top, *below = path_of(schema, name)
    column = F.col("`" + top.replace("`", "``") + "`")
    for child in below:
        column = column.getField(child)
    return column
