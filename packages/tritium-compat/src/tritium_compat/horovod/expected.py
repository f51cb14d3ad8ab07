"""The allreduce that the next round will most likely do, so that it is tried without asking first (rank).

A training asks for the same allreduces in each step. Every rank sees the same rounds, so all expect the same next one;
they do it at once, with a number in front that says how many ranks had it. Where that is not all of them, the sum is
thrown away, and the ranks ask each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tritium_compat.horovod.request import Signature

SURE = 4  # how many rounds in a row must have been as expected
_MOST = 4 << 20  # bytes that may be sent in vain
_TYPES = {"float32": 4, "float64": 8}  # in which the number of ranks is exact


@dataclass(frozen=True)
class Fused:
    """Allreduces that go as one: how many requests, their digest, and the type and number of their elements."""

    count: int
    digest: int
    dtype: str
    elements: int


class Expected:
    """What followed which round, alike on every rank."""

    def __init__(self) -> None:
        self._after: dict[int, Fused] = {}
        self._last: int | None = None
        self._right = 0

    def next(self) -> Fused | None:
        """Return what the next round will do, if that is nearly certain."""
        return self._guess() if self._right >= SURE else None

    def saw(self, signatures: Sequence[Signature], digest: int) -> None:
        """Learn that a round did these requests; none of them: something else."""
        guess, this = self._guess(), fused(signatures, digest)
        self._right = self._right + 1 if this is not None and guess == this else 0
        if self._last is not None and this is not None:
            self._after[self._last] = this
        self._last = None if this is None else this.digest

    def _guess(self) -> Fused | None:
        return None if self._last is None else self._after.get(self._last)


def fused(signatures: Sequence[Signature], digest: int) -> Fused | None:
    """Return these requests as one allreduce; None where they are not one small sum of floats on CPUs."""
    kinds = {(one.kind, one.device, one.detail) for one in signatures}
    dtypes = {dtype for one in signatures for dtype, _ in one.tensors}
    if len(kinds) != 1 or len(dtypes) != 1:
        return None
    ((kind, device, detail),), (dtype,) = kinds, dtypes
    if (kind, device) != ("allreduce", "cpu") or dict(detail)["op"] not in ("sum", "average") or dtype not in _TYPES:
        return None
    elements = sum(_product(shape) for one in signatures for _, shape in one.tensors)
    return Fused(len(signatures), digest, dtype, elements) if elements * _TYPES[dtype] <= _MOST else None


def _product(shape: Sequence[int]) -> int:
    found = 1
    for size in shape:
        found *= size
    return found
