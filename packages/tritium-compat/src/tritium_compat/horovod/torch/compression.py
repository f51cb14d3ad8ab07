"""`Compression`: how gradients are sent (rank)."""

from __future__ import annotations

from typing import Any

import torch


class Compressor:
    """Sends tensors as they are."""

    dtype: torch.dtype | None = None

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return what is sent, and what `decompress` needs to know."""
        if cls.dtype is None or not tensor.is_floating_point():
            return tensor, tensor.dtype
        return tensor.to(cls.dtype), tensor.dtype

    @classmethod
    def decompress(cls, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor in its own dtype."""
        return tensor if ctx is None or tensor.dtype == ctx else tensor.to(ctx)


class _Half(Compressor):
    dtype = torch.float16


class _Bfloat16(Compressor):
    dtype = torch.bfloat16


class Compression:
    """The kinds there are."""

    none = Compressor
    fp16 = _Half
    bf16 = _Bfloat16
