"""`Unischema`: the fields of a data set with their types, shapes and codecs (any process)."""

from __future__ import annotations

import re
import warnings
from collections import namedtuple
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from tritium.integration import suggest
from tritium_compat.petastorm.arrow_schema import is_list, numpy_type


class UnischemaField(NamedTuple):
    """A field. Fields are equal that differ in their codec only.

    numpy_dtype : a type of numpy (`np.float32`), or `decimal.Decimal`.
    shape : () for a scalar; None for a dimension of any length.
    codec : how a value is stored, see `codecs`; None: as Parquet stores it.
    nullable : whether it may be None.
    """

    name: str
    numpy_dtype: Any
    shape: tuple[int | None, ...]
    codec: Any = None
    nullable: bool | None = False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UnischemaField) and _compared(self) == _compared(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(_compared(self))


def _compared(field: UnischemaField) -> tuple[Any, ...]:
    return field.name, field.numpy_dtype, field.shape, field.nullable


class Unischema:
    """The fields of a data set, each also an attribute by its name."""

    _name: str  # these two, and the attributes, are what Petastorm reads from the file that a schema is stored in
    _fields: dict[str, UnischemaField]

    def __init__(self, name: str, fields: Iterable[UnischemaField]) -> None:
        """Name a schema and give its fields in their order."""
        self._name = name
        self._fields = {field.name: field for field in fields}
        for field in self._fields.values():
            if hasattr(self, field.name):
                warnings.warn(f"The field {field.name!r} is reached as fields[{field.name!r}] only.", stacklevel=2)
            else:
                setattr(self, field.name, field)

    def __getattr__(self, name: str) -> Any:  # for type checkers: fields are attributes
        raise AttributeError(f"{type(self).__name__} has no field or attribute {name!r}")

    @property
    def fields(self) -> dict[str, UnischemaField]:
        """The fields by name, in their order."""
        return self._fields

    def create_schema_view(self, fields: Iterable[UnischemaField | str]) -> Unischema:
        """Return a schema of some fields only. A string is a regular expression that matches whole names."""
        given = list(fields)
        exact = [field.name for field in given if isinstance(field, tuple)]
        patterns = [field for field in given if isinstance(field, str)]
        if len(exact) + len(patterns) != len(given):
            wrong = [field for field in given if not isinstance(field, (tuple, str))]
            raise ValueError(f"A field is a UnischemaField or a regular expression, not {wrong[0]!r}.")
        for name in exact:
            if name not in self._fields:
                raise ValueError(f"field {name!r} does not belong to the schema.{suggest(name, self._fields)}")
        chosen = [self._fields[name] for name in exact]
        chosen += [field for field in match_unischema_fields(self, patterns) if field.name not in exact]
        return Unischema(f"{self._name}_view", chosen)

    def make_namedtuple(self, **values: Any) -> Any:
        """Return a row as a named tuple."""
        return self._get_namedtuple()(**values)

    def make_namedtuple_tf(self, *args: Any, **values: Any) -> Any:
        """Return a row of tensors as a named tuple."""
        return self._get_namedtuple()(*args, **values)

    def _get_namedtuple(self) -> Any:
        return row_type(self._name, tuple(self._fields))

    def as_spark_schema(self) -> Any:
        """Return Spark's schema of the stored values."""
        from pyspark.sql.types import StructField, StructType

        return StructType(
            [StructField(field.name, spark_type(field), bool(field.nullable)) for field in self._fields.values()]
        )

    @classmethod
    def from_arrow_schema(cls, arrow_schema: Any, omit_unsupported_fields: bool = True) -> Unischema:
        """Return the schema of a Parquet file without one of Petastorm's, from its `pyarrow.Schema`.

        Columns of types that can't be read are left out with a warning, or refused by a ValueError.
        """
        fields = []
        for column in arrow_schema:
            try:
                kind = numpy_type(column.type)
            except ValueError as error:
                if not omit_unsupported_fields:
                    raise
                warnings.warn(f"The column {column.name!r} is left out. {error}", stacklevel=2)
                continue
            shape: tuple[int | None, ...] = (None,) if is_list(column.type) else ()
            fields.append(UnischemaField(column.name, kind, shape, None, column.nullable))
        return cls("inferred_schema", fields)

    def __str__(self) -> str:
        lines = [
            f"  UnischemaField('{f.name}', {getattr(f.numpy_dtype, '__name__', f.numpy_dtype)}, {f.shape}, {f.codec}, "
            f"{f.nullable}),\n"
            for f in self._fields.values()
        ]
        return f"Unischema({self._name}, [\n{''.join(lines)}])"


_row_types: dict[tuple[str, tuple[str, ...]], Any] = {}


def row_type(schema: str, fields: tuple[str, ...]) -> Any:
    """Return the named tuple of a schema's rows: one type for equal schemas, which tf.data compares by identity."""
    if (schema, fields) not in _row_types:
        _row_types[schema, fields] = namedtuple(f"{schema}_view", fields)
    return _row_types[schema, fields]


def spark_type(field: UnischemaField) -> Any:
    """Return Spark's type of a field's stored values."""
    from pyspark.sql import types

    if field.codec is not None:
        return field.codec.spark_dtype()
    if field.shape != ():
        raise ValueError(
            f"The field {field.name!r} has the shape {field.shape} and no codec, so its Spark type is not known. Give "
            "it one, such as NdarrayCodec()."
        )
    by_type = {
        np.int8: types.ByteType,
        np.uint8: types.ShortType,
        np.int16: types.ShortType,
        np.uint16: types.IntegerType,
        np.int32: types.IntegerType,
        np.int64: types.LongType,
        np.float32: types.FloatType,
        np.float64: types.DoubleType,
        np.bytes_: types.StringType,
        np.str_: types.StringType,
        np.bool_: types.BooleanType,
    }
    if field.numpy_dtype not in by_type:
        raise ValueError(
            f"No Spark type is known for {field.numpy_dtype} of the field {field.name!r}. Give it a ScalarCodec."
        )
    return by_type[field.numpy_dtype]()


def dict_to_spark_row(unischema: Unischema, row_dict: Mapping[str, Any]) -> Any:
    """Return a row as a `pyspark.sql.Row` of stored values, each encoded by the codec of its field."""
    from pyspark.sql import Row

    values = dict(row_dict)
    insert_explicit_nulls(unischema, values)
    if unknown := set(values) - set(unischema.fields):
        name = min(unknown)
        raise ValueError(f"The row has a field {name!r} that the schema has not.{suggest(name, unischema.fields)}")
    encoded = {name: _encoded(field, values[name]) for name, field in unischema.fields.items()}
    row = Row(*encoded.values())
    row.__fields__ = list(encoded)
    return row


def _encoded(field: UnischemaField, value: Any) -> Any:
    if value is None:
        if not field.nullable:
            raise ValueError(f"The field {field.name!r} is None, and it is not nullable.")
        return None
    if field.codec is not None:
        return field.codec.encode(field, value)
    return value.tolist() if isinstance(value, np.generic) else value


def insert_explicit_nulls(unischema: Unischema, row_dict: dict[str, Any]) -> None:
    """Put None into a row, in place, for each nullable field that it lacks."""
    for name, field in unischema.fields.items():
        if name not in row_dict:
            if not field.nullable:
                raise ValueError(f"The row has no field {name!r}, which is not nullable.")
            row_dict[name] = None


def match_unischema_fields(schema: Unischema, field_regex: Iterable[str]) -> list[UnischemaField]:
    """Return the fields whose whole names match one of the regular expressions, in the schema's order."""
    patterns = [re.compile(pattern) for pattern in field_regex]
    return [field for name, field in schema.fields.items() if any(p.fullmatch(name) for p in patterns)]
