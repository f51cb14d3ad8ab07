"""Tensors and arrays in a state: how those of each framework are copied and restored (any process)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from tritium.errors import BadSetting, ModelError
from tritium.model.safetensors import CODES, Entry, count_of


@dataclass(frozen=True)
class Leaf:
    """A tensor or an array on its way into a safetensors file."""

    kind: Kind
    name: str
    value: Any
    dtype: str
    code: str | None
    """The dtype in the file. None: safetensors does not know it, and the value is written as plain bytes."""
    shape: tuple[int, ...]
    width: int
    """Bytes of one element."""
    size: int
    """Bytes of all elements."""

    @property
    def entry(self) -> tuple[str, str, Sequence[int], int]:
        """Its entry for the header of the file: name, code, shape, bytes."""
        return (self.name, self.code, self.shape, self.size) if self.code else (self.name, "U8", [self.size], self.size)


class Kind(ABC):
    """The tensors of one framework."""

    name: ClassVar[str]
    """The framework's package, or its kind of tensor: the key of such a value in the tree of a state."""
    of_one_rank: ClassVar[bool] = False
    """Whether a value is a part of one that all ranks hold together, so that it belongs to a rank's own state."""

    @abstractmethod
    def has(self, value: Any) -> bool:
        """Return whether this value is of this kind."""

    @abstractmethod
    def same(self, value: Any, path: str) -> Hashable | None:
        """Return an equal key for values of the same memory, which is written once; None for one that shares none.

        Raises BadSetting, with `path`, for a value that a checkpoint can't hold.
        """

    @abstractmethod
    def leaf(self, value: Any, name: str) -> Leaf:
        """Return the leaf that is written for this value, under this name."""

    def facts(self, value: Any) -> dict[str, Any]:
        """Return the facts of the value that the tree holds beside its name, dtype and shape."""
        return {}

    @abstractmethod
    def copy(self, leaf: Leaf, into: np.ndarray[Any, Any]) -> None:
        """Copy to `into`, as many bytes (uint8) as the leaf has. The copy may be incomplete until `wait`."""

    def locks(self, value: Any) -> bool:
        """Return whether copies of this value are faster into page-locked memory."""
        return False

    def locked(self, size: int) -> tuple[Any, np.ndarray[Any, Any]]:
        """Return the owner of page-locked memory, and this memory as an array `[size]` of uint8."""
        raise NotImplementedError

    def wait(self, values: Iterable[Any]) -> None:  # noqa: B027 - most copies are complete when `copy` returns
        """Return when the copies of these values are complete."""

    @abstractmethod
    def restored(self, buffer: bytearray, name: str, entry: Entry, node: Mapping[str, Any]) -> Any:
        """Return the value of this node of the tree, as a view of `buffer`. Raises ModelError when it does not fit."""


class NumpyArray(Kind):
    """NumPy's arrays."""

    name = "numpy"

    def has(self, value: Any) -> bool:
        return type(value) is np.ndarray

    def same(self, value: Any, path: str) -> None:
        refuse_dtype(value.dtype, path)

    def leaf(self, value: Any, name: str) -> Leaf:
        dtype = value.dtype
        code = CODES.get(dtype.name) if dtype.isnative else None
        return Leaf(self, name, value, dtype.str, code, value.shape, max(1, dtype.itemsize), value.nbytes)

    def copy(self, leaf: Leaf, into: np.ndarray[Any, Any]) -> None:
        np.copyto(into.view(leaf.value.dtype).reshape(leaf.shape), leaf.value)

    def restored(self, buffer: bytearray, name: str, entry: Entry, node: Mapping[str, Any]) -> Any:
        dtype, count = np.dtype(node["dtype"]), count_of(node["shape"])
        if entry.end - entry.start != count * dtype.itemsize:
            raise ModelError(f"The array {name!r} has {entry.end - entry.start} bytes for {count} of {dtype}.")
        if entry.end == entry.start:
            return np.ndarray(node["shape"], dtype, bytearray())  # By np.empty, strings of 0 bytes take 1.
        return np.frombuffer(buffer, dtype, count, entry.start).reshape(node["shape"])


def refuse_dtype(dtype: np.dtype[Any], path: str) -> None:
    """Raise BadSetting for a dtype that can't be restored by its name: objects, and structures with fields."""
    if dtype.hasobject or np.dtype(dtype.str) != dtype:
        raise BadSetting(f"{path} is a NumPy value of dtype {dtype}, which a checkpoint can't hold.", path=path)
