"""`Compression` for whichever back end Keras has (rank)."""

from __future__ import annotations

from typing import Any

import keras


class Compressor:
    """Sends tensors as they are."""

    dtype: str | None = None

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """Return what is sent, and what `decompress` needs to know."""
        own = keras.backend.standardize_dtype(tensor.dtype)
        if cls.dtype is None or "float" not in own:
            return tensor, own
        return keras.ops.cast(tensor, cls.dtype), own

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        """Return the tensor in its own dtype."""
        own = keras.backend.standardize_dtype(tensor.dtype)
        return tensor if ctx is None or own == ctx else keras.ops.cast(tensor, ctx)


class _Half(Compressor):
    dtype = "float16"


class _Bfloat16(Compressor):
    dtype = "bfloat16"


class Compression:
    """The kinds there are."""

    none = Compressor
    fp16 = _Half
    bf16 = _Bfloat16
