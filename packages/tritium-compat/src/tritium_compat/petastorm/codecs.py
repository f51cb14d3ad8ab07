"""How values are stored in a data set: Petastorm's codecs (any process).

The names of the classes and of their attributes are part of Petastorm's file format.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from io import BytesIO
from typing import Any

import numpy as np

from tritium_compat.petastorm import images
from tritium_compat.petastorm.unischema import UnischemaField


class DataframeColumnCodec(ABC):
    """What a codec does."""

    @abstractmethod
    def encode(self, unischema_field: UnischemaField, value: Any) -> Any:
        """Return the stored form of a value; ValueError where it does not fit the field."""

    @abstractmethod
    def decode(self, unischema_field: UnischemaField, value: Any) -> Any:
        """Return the value of a stored form."""

    @abstractmethod
    def spark_dtype(self) -> Any:
        """Return Spark's type of the stored form."""


class _Bytes(DataframeColumnCodec):
    def spark_dtype(self) -> Any:
        """Return Spark's type of bytes."""
        from pyspark.sql.types import BinaryType

        return BinaryType()

    def __str__(self) -> str:
        return f"{type(self).__name__}()"


class NdarrayCodec(_Bytes):
    """An array, as `np.save` writes it."""

    def encode(self, unischema_field: UnischemaField, value: Any) -> bytearray:
        """Return the array's bytes."""
        _check(unischema_field, value)
        file = BytesIO()
        np.save(file, value)
        return bytearray(file.getvalue())

    def decode(self, unischema_field: UnischemaField, value: bytes) -> Any:
        """Return the array."""
        return np.load(BytesIO(value), allow_pickle=False)


class CompressedNdarrayCodec(_Bytes):
    """An array, as `np.savez_compressed` writes it."""

    def encode(self, unischema_field: UnischemaField, value: Any) -> bytearray:
        """Return the array's bytes, compressed."""
        _check(unischema_field, value)
        file = BytesIO()
        np.savez_compressed(file, arr=value)
        return bytearray(file.getvalue())

    def decode(self, unischema_field: UnischemaField, value: bytes) -> Any:
        """Return the array."""
        with np.load(BytesIO(value), allow_pickle=False) as arrays:
            return arrays["arr"]


class CompressedImageCodec(_Bytes):
    """An image [height, width] or [height, width, 3] (RGB), as a file of an image format."""

    def __init__(self, image_codec: str = "png", quality: int = 80) -> None:
        """Choose the format, "png" or "jpeg", and the quality of a JPEG (0 to 100)."""
        self._image_codec = "." + image_codec
        self._quality = quality

    @property
    def image_codec(self) -> str:
        """The format."""
        return self._image_codec[1:]

    def encode(self, unischema_field: UnischemaField, value: Any) -> bytearray:
        """Return the file's bytes."""
        _check(unischema_field, value)
        if not (value.ndim == 2 or (value.ndim == 3 and value.shape[2] == 3)):
            raise ValueError(
                f"The image of the field {unischema_field.name!r} has the shape {value.shape}. It must be [height, "
                "width] or [height, width, 3]."
            )
        return bytearray(images.encode(value, self.image_codec, self._quality))

    def decode(self, unischema_field: UnischemaField, value: bytes) -> Any:
        """Return the image as an array."""
        return images.decode(value)

    def __str__(self) -> str:
        return f"CompressedImageCodec('{self.image_codec}', {self._quality})"


class ScalarCodec(DataframeColumnCodec):
    """A scalar, as one of Spark's types."""

    def __init__(self, spark_type: Any) -> None:
        """Choose Spark's type, such as `IntegerType()`."""
        self._spark_type = spark_type

    def encode(self, unischema_field: UnischemaField, value: Any) -> Any:
        """Return the value as Spark takes it."""
        name = unischema_field.name
        if unischema_field.shape:
            raise ValueError(f"The field {name!r} has the shape {unischema_field.shape}; a scalar's is ().")
        if isinstance(value, np.ndarray) and value.shape == ():
            value = value[()]
        if hasattr(value, "__len__") and not isinstance(value, (str, np.str_)):
            raise TypeError(f"The field {name!r} takes a scalar, not a {type(value).__name__}.")
        kind = self._spark_type.typeName()
        if kind in ("byte", "tinyint", "short", "smallint", "integer", "long", "bigint"):
            return int(value)
        if kind in ("float", "double"):
            return float(value)
        if kind == "boolean":
            return bool(value)
        if kind == "string":
            if not isinstance(value, str):
                raise ValueError(f"The field {name!r} takes a string, not a {type(value).__name__}.")
            return str(value)
        return value

    def decode(self, unischema_field: UnischemaField, value: Any) -> Any:
        """Return the value in the field's type."""
        return unischema_field.numpy_dtype(value)

    def spark_dtype(self) -> Any:
        """Return the Spark type that was given."""
        return self._spark_type

    def __str__(self) -> str:
        return f"ScalarCodec({type(self._spark_type).__name__}())"


def _check(field: UnischemaField, value: Any) -> None:
    """Refuse an array whose type or shape is not the field's."""
    if not isinstance(value, np.ndarray):
        raise ValueError(
            f"The field {field.name!r} takes an array of {field.numpy_dtype}, not a {type(value).__name__}."
        )
    if value.dtype.type != np.dtype(field.numpy_dtype).type:
        raise ValueError(f"The field {field.name!r} takes {np.dtype(field.numpy_dtype)}; the array has {value.dtype}.")
    fits = len(value.shape) == len(field.shape) and all(
        wanted is None or size == wanted for size, wanted in zip(value.shape, field.shape, strict=True)
    )
    if not fits:
        raise ValueError(f"The field {field.name!r} takes the shape {field.shape}; the array has {value.shape}.")
