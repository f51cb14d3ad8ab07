"""The Unischema in a data set's metadata, which Petastorm pickles (any process).

Pickle runs what a file names. Here only the names that a Unischema is made of are known; any other is refused.
"""

from __future__ import annotations

import builtins
import collections
import copyreg
import decimal
import io
import pickle
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from tritium_compat.petastorm import codecs, unischema
from tritium_compat.petastorm.errors import PetastormMetadataError

UNISCHEMA_KEY = b"dataset-toolkit.unischema.v1"
ROW_GROUPS_PER_FILE_KEY = b"dataset-toolkit.num_row_groups_per_file.v1"

_OWN = "tritium_compat.petastorm."
_PACKAGES = ("petastorm", "av.experimental.deepdrive.dataset_toolkit", "av.ml.dataset_toolkit")  # it has been renamed
_BUILTINS = ("object", "int", "float", "str", "bool", "bytes", "tuple")
_CODECS = ("ScalarCodec", "NdarrayCodec", "CompressedNdarrayCodec", "CompressedImageCodec", "DataframeColumnCodec")
_OLD_TYPES = {"unicode_": np.str_, "string_": np.bytes_, "bool": np.bool_, "bool8": np.bool_, "float_": np.float64}


def _restored(name: str, fields: Sequence[str], values: Sequence[Any]) -> Any:
    """Return a named tuple as older versions of PySpark pickled it: by its fields' names."""
    if name != "UnischemaField":
        raise pickle.UnpicklingError(f"a named tuple {name!r} in a Unischema")
    return unischema.UnischemaField(**dict(zip(fields, values, strict=True)))


_KNOWN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("copyreg", "_reconstructor"): copyreg._reconstructor,  # type: ignore[attr-defined]
    ("decimal", "Decimal"): decimal.Decimal,
    ("numpy", "dtype"): np.dtype,
    ("pyspark.serializers", "_restore"): _restored,
    **{("builtins", name): getattr(builtins, name) for name in _BUILTINS},
    **{("petastorm.unischema", name): getattr(unischema, name) for name in ("Unischema", "UnischemaField")},
    **{("petastorm.codecs", name): getattr(codecs, name) for name in _CODECS},
}
_MODULES_NOW = {"__builtin__": "builtins", "copy_reg": "copyreg", "pyspark.sql.types": "pyspark.sql.types"}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        module = _MODULES_NOW.get(module, module)
        for package in _PACKAGES:
            if module.startswith(f"{package}."):
                module = f"petastorm.{module.removeprefix(f'{package}.')}"
        known = _KNOWN.get((module, name)) or _numpy_type(module, name) or _spark_type(module, name)
        if known is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which a Unischema is not made of")
        return known


def _numpy_type(module: str, name: str) -> Any:
    if module != "numpy":
        return None
    found = _OLD_TYPES.get(name) or getattr(np, name, None)
    return found if isinstance(found, type) and issubclass(found, np.generic) else None


def _spark_type(module: str, name: str) -> Any:
    if module != "pyspark.sql.types":
        return None
    from pyspark.sql import types

    found = getattr(types, name, None)
    return found if isinstance(found, type) and issubclass(found, types.DataType) else None


def loads(contents: bytes) -> unischema.Unischema:
    """Return the Unischema of its stored form; PetastormMetadataError where it names anything else."""
    try:
        schema = _Unpickler(io.BytesIO(contents), encoding="latin1").load()
    except ImportError as error:
        raise PetastormMetadataError(
            "The stored Unischema names Spark's types, and pyspark is not installed here: pip install pyspark."
        ) from error
    except Exception as error:
        raise PetastormMetadataError(
            f"The stored Unischema can't be read: {error}. Only Petastorm's own codecs, numpy's types and Spark's can "
            "be in it. Store the data set again with those."
        ) from error
    if not isinstance(schema, unischema.Unischema):
        raise PetastormMetadataError(f"The stored Unischema is a {type(schema).__name__}.")
    # Made again: what was stored may be a dict of another kind, fields of an older form, or attributes of any name.
    fields = [unischema.UnischemaField(*field) for field in schema._fields.values()]
    return unischema.Unischema(schema._name, fields)


_PythonPickler: Any = pickle._Pickler  # the one in C does not ask how a class is named


class _Pickler(_PythonPickler):  # type: ignore[misc]
    """Names classes as Petastorm has them, so that it can read what is stored here."""

    def save_global(self, obj: Any, name: str | None = None) -> None:
        module, name = obj.__module__, name or obj.__qualname__
        if isinstance(obj, type) and issubclass(obj, np.bool_):
            name = "bool_"  # numpy 1 has no numpy.bool
        self.save(module.replace(_OWN, "petastorm.", 1))
        self.save(name)
        self.write(pickle.STACK_GLOBAL)
        self.memoize(obj)

    dispatch: ClassVar[dict[Any, Any]] = {**_PythonPickler.dispatch, type: save_global}


def dumps(schema: unischema.Unischema) -> bytes:
    """Return the stored form of a Unischema, which Petastorm reads too."""
    for field in schema.fields.values():
        if field.codec is not None and type(field.codec) not in {getattr(codecs, name) for name in _CODECS}:
            raise PetastormMetadataError(
                f"The field {field.name!r} has a codec of your own, {type(field.codec).__name__}. Only "
                f"{', '.join(_CODECS[:-1])} can be stored and read again."
            )
    file = io.BytesIO()
    _Pickler(file, protocol=4).dump(schema)
    return file.getvalue()
