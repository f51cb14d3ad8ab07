"""`Compression`: how tensors of TensorFlow are sent (rank)."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class Compressor:
    """Sends tensors as they are."""

    dtype: Any = None

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """Return what is sent, and what `decompress` needs to know."""
        if cls.dtype is None or not tensor.dtype.is_floating:
            return tensor, tensor.dtype
        return tf.cast(tensor, cls.dtype), tensor.dtype

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        """Return the tensor in its own dtype."""
        return tensor if ctx is None or tensor.dtype == ctx else tf.cast(tensor, ctx)


class _Half(Compressor):
    dtype = tf.float16


class _Bfloat16(Compressor):
    dtype = tf.bfloat16


class Compression:
    """The kinds there are."""

    none = Compressor
    fp16 = _Half
    bf16 = _Bfloat16
