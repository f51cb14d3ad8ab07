"""A state as a tree of JSON and a safetensors file, and back, with every value and type as it was (any process).

A state is dicts, lists and tuples of tensors, arrays, numbers, strings, bools and None, such as `state_dict()` and
random generators return. In the tree a JSON list is a list, and the first key of an object says what it holds:

    {"dict": {…}}          string keys           {"torch": name, "dtype": …, "shape": […]}   a tensor of the file
    {"items": [[k, v]…]}   any other keys        {"numpy": name, "dtype": …, "shape": […]}   an array of the file
    {"ordered": [[k, v]…]} an OrderedDict        {"scalar": hex, "dtype": …}                 a NumPy scalar
    {"tuple": […]}                               {"int": hex}, {"float": text}               a number beyond JSON
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, cast

import numpy as np

from tritium.errors import MALFORMED, BadSetting, ModelError
from tritium.model import safetensors
from tritium.model.engines import registry
from tritium.model.leaf import Kind, Leaf, NumpyArray, refuse_dtype

_DEEPEST = 100
_LARGEST = 1 << 63
_CHUNK = 16 << 20
_ALLOWED = (
    "A checkpoint holds dicts, lists and tuples of tensors, NumPy arrays and scalars, numbers, strings, bools and None."
)


class Snapshot:
    """A state copied into its own memory, so that training continues while it is written.

    The next `take` reuses the memory, which is page-locked when a tensor is on a GPU.
    """

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)
        self._lock_owner: Any = None
        self._header = b""
        self.structure = b""
        self.size = 0

    def take(self, state: Any, called: str) -> Snapshot:
        """Copy `state`. Raises BadSetting with the first value that can't be held: `state['optimizer'][3] is a Foo`."""
        packer = _Packer(called)
        tree = packer.node(state, called, "", 0)
        # Wide elements come first, which aligns all.
        leaves = sorted(packer.leaves.values(), key=lambda leaf: -(leaf.width & -leaf.width))
        self.structure = json.dumps({"format": 1, "state": tree}, separators=(",", ":")).encode()
        self._header = safetensors.header((leaf.entry for leaf in leaves), {"format": "tritium"})
        self.size = sum(leaf.size for leaf in leaves)
        self._reserve(next((leaf.kind for leaf in leaves if leaf.kind.locks(leaf.value)), None))
        start = 0
        for leaf in leaves:
            if leaf.size:
                leaf.kind.copy(leaf, self._memory[start : start + leaf.size])
            start += leaf.size
        for kind in {leaf.kind.name: leaf.kind for leaf in leaves}.values():
            kind.wait(leaf.value for leaf in leaves if leaf.kind is kind)
        return self

    def _reserve(self, locking: Kind | None) -> None:
        if len(self._memory) >= self.size and (locking is None or self._lock_owner is not None):
            return
        # The old memory is freed before the new is allocated.
        self._memory, self._lock_owner = np.empty(0, np.uint8), None
        if locking is None:
            self._memory = np.empty(self.size, np.uint8)
        else:
            self._lock_owner, self._memory = locking.locked(self.size)

    @property
    def total(self) -> int:
        """The bytes of the two files together."""
        return len(self._header) + self.size + len(self.structure)

    def pieces(self) -> Iterator[bytes | memoryview]:
        """Yield the safetensors file in pieces."""
        yield self._header
        for start in range(0, self.size, _CHUNK):
            yield self._memory[start : min(start + _CHUNK, self.size)].data


class _Packer:
    """A walk over a state, which makes its tree and collects its tensors."""

    def __init__(self, called: str) -> None:
        self.leaves: dict[Any, Leaf] = {}
        self._called = called
        self._names = {"__metadata__"}
        self._kinds: list[Kind] = [NumpyArray(), *registry.kinds()]

    def node(self, value: Any, path: str, name: str, depth: int) -> Any:
        kind = type(value)
        if depth > _DEEPEST:
            raise BadSetting(f"{path[:200]}… is nested more than {_DEEPEST} deep. Does {self._called} contain itself?")
        if value is None or kind in (bool, str):
            return value
        if kind is int:
            return value if -_LARGEST <= value < _LARGEST else {"int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        if kind is list or kind is tuple:
            items = [self.node(v, f"{path}[{i}]", f"{name}.{i}", depth + 1) for i, v in enumerate(value)]
            return items if kind is list else {"tuple": items}
        if kind is dict or kind is OrderedDict:
            return self._mapping(value, path, name, depth)
        if isinstance(value, np.generic):
            refuse_dtype(value.dtype, path)
            return {"scalar": np.asarray(value).tobytes().hex(), "dtype": value.dtype.str}
        for known in self._kinds:
            if known.has(value):
                return self._leaf(known, value, path, name)
        raise BadSetting(f"{path} is a {kind.__module__}.{kind.__qualname__}. {_ALLOWED}", path=path)

    def _mapping(self, value: Mapping[Any, Any], path: str, name: str, depth: int) -> Any:
        inner = [(key, self.node(v, f"{path}[{key!r}]", f"{name}.{key}", depth + 1)) for key, v in value.items()]
        if type(value) is dict and all(type(key) is str for key, _ in inner):
            return {"dict": dict(inner)}
        items = []
        for key, node in inner:
            if key is not None and type(key) not in (str, int, float, bool):
                raise BadSetting(
                    f"A key of {path} is {key!r}, a {type(key).__qualname__}. Keys are strings, numbers, bools or None."
                )
            items.append([self.node(key, path, name, depth + 1), node])
        return {"ordered" if type(value) is OrderedDict else "items": items}

    def _leaf(self, kind: Kind, value: Any, path: str, name: str) -> Any:
        if kind.of_one_rank and self._called != "own":
            raise BadSetting(
                f"{path} is a {type(value).__qualname__}, of which each rank holds a part, and rank 0 alone writes "
                f"{self._called!r}. Save it with own=, which every rank writes; or the whole: its full_tensor().",
                path=path,
            )
        same = kind.same(value, path)  # The same memory under two names (tied weights) is written once.
        key: Any = len(self.leaves) if same is None else (kind.name, same)
        if key not in self.leaves:
            self.leaves[key] = kind.leaf(value, self._free(name))
        leaf = self.leaves[key]
        return {kind.name: leaf.name, "dtype": leaf.dtype, "shape": list(leaf.shape), **kind.facts(value)}

    def _free(self, name: str) -> str:
        wanted = name.removeprefix(".") or "state"
        unused, number = wanted, 2
        while unused in self._names:
            unused, number = f"{wanted}#{number}", number + 1
        self._names.add(unused)
        return unused


def unpack(structure: bytes | bytearray, tensors: bytearray) -> Any:
    """Return the state. Its tensors and arrays are writable views of `tensors`, on the CPU. Raises ModelError."""
    entries, _ = safetensors.entries(tensors)
    return _Unpacker(tensors, entries).state(structure)


def outline(structure: bytes | bytearray) -> Any:
    """Return the state with None for each tensor and array. Raises ModelError."""
    return _Outline(bytearray(), {}).state(structure)


class _Unpacker:
    def __init__(self, buffer: bytearray, entries: Mapping[str, safetensors.Entry]) -> None:
        self._buffer = buffer
        self._entries = entries
        self._made: dict[Any, Any] = {}

    def state(self, structure: bytes | bytearray) -> Any:
        """Return the state of a file of JSON. Raises ModelError for any other file."""
        try:
            body = json.loads(structure)
            if body["format"] != 1:
                raise ModelError(f"This state has format {body['format']!r}, and this Tritium reads format 1.")
            return self.value(body["state"])
        except MALFORMED as error:
            raise ModelError(f"The state is damaged: {error!r:.200}.") from error

    def value(self, node: Any) -> Any:
        if isinstance(node, list):
            return [self.value(item) for item in node]
        if not isinstance(node, dict):
            return node
        kind, inner = next(iter(node.items()), cast(tuple[str, Any], ("", None)))
        if kind == "dict":
            return {key: self.value(item) for key, item in inner.items()}
        if kind == "items":
            return {self.value(key): self.value(item) for key, item in inner}
        if kind == "ordered":
            return OrderedDict((self.value(key), self.value(item)) for key, item in inner)
        if kind == "tuple":
            return tuple(self.value(item) for item in inner)
        if kind == "int":
            return int(inner, 16)
        if kind == "float":
            return float(inner)
        if kind == "scalar":
            data, dtype = bytes.fromhex(inner), np.dtype(node["dtype"])
            return np.frombuffer(data, dtype, 1)[0] if dtype.itemsize else np.zeros((), dtype)[()]
        return self.leaf(kind, inner, node)

    def leaf(self, kind: str, inner: Any, node: Mapping[str, Any]) -> Any:
        """Return a tensor or an array; the same object for each reference to it."""
        known = NumpyArray() if kind == "numpy" else registry.kind(kind)
        if known is None or inner not in self._entries:
            raise ModelError(f"The state holds {kind!r} {str(inner)[:80]!r}, which is not known here.")
        key = (inner, node.get("parameter"))
        if key not in self._made:
            self._made[key] = known.restored(self._buffer, inner, self._entries[inner], node)
        return self._made[key]


class _Outline(_Unpacker):
    def leaf(self, kind: str, inner: Any, node: Mapping[str, Any]) -> Any:
        return None
