"""A state as a tree of JSON and a safetensors file, and back, with every value and type as it was (any process).

A state is dicts, lists and tuples of tensors, arrays, numbers, strings, bools and None: what `state_dict()` gives, and
what random generators say of themselves. In the tree a JSON list is a list and an object has one key, which says what
stands behind it:

    {"dict": {…}}          string keys           {"torch": name, "dtype": …, "shape": […]}   a tensor of the file
    {"items": [[k, v]…]}   any other keys        {"numpy": name, "dtype": …, "shape": […]}   an array of the file
    {"ordered": [[k, v]…]} an OrderedDict        {"scalar": hex, "dtype": …}                 a NumPy scalar
    {"tuple": […]}                               {"int": hex}, {"float": text}               what JSON can't hold
"""

from __future__ import annotations

import json
import math
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tritium.errors import BadSetting, ModelError
from tritium.model import weights

_DEEPEST = 100
_LARGEST = 1 << 63
_CHUNK = 16 << 20
_ALLOWED = (
    "A checkpoint holds dicts, lists and tuples of tensors, NumPy arrays and scalars, numbers, strings, bools and None."
)


@dataclass
class Leaf:
    """A tensor or an array on its way into the file."""

    name: str
    value: Any
    torch: bool
    dtype: str
    code: str | None  # None: a dtype that safetensors does not know, written as plain bytes
    shape: tuple[int, ...]
    width: int
    size: int

    @property
    def entry(self) -> tuple[str, str, Sequence[int], int]:
        """As the header of the file says it."""
        return (self.name, self.code, self.shape, self.size) if self.code else (self.name, "U8", [self.size], self.size)


class Snapshot:
    """A state copied into memory of its own, so that training goes on while it is written.

    The memory is used again by the next `take`, and is page-locked when a tensor lies on a GPU.
    """

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)
        self._owner: Any = None  # of page-locked memory
        self._header = b""
        self.structure = b""
        self.size = 0

    def take(self, state: Any, called: str) -> Snapshot:
        """Copy `state`. BadSetting names the first value that can't be kept: `state['optimizer'][3] is a Foo`."""
        packer = _Packer(called)
        tree = packer.node(state, called, "", 0)
        leaves = sorted(packer.leaves.values(), key=lambda leaf: -(leaf.width & -leaf.width))  # so all are aligned
        self.structure = json.dumps({"format": 1, "state": tree}, separators=(",", ":")).encode()
        self._header = weights.header((leaf.entry for leaf in leaves), {"format": "tritium"})
        self.size = sum(leaf.size for leaf in leaves)
        devices = {leaf.value.device for leaf in leaves if leaf.torch and leaf.value.is_cuda}
        self._reserve(bool(devices))
        start = 0
        for leaf in leaves:
            _copy(leaf, self._memory[start : start + leaf.size])
            start += leaf.size
        for device in devices:  # copies from there are still under way
            sys.modules["torch"].cuda.synchronize(device)
        return self

    def _reserve(self, locked: bool) -> None:
        if len(self._memory) >= self.size and (not locked or self._owner is not None):
            return
        self._memory, self._owner = np.empty(0, np.uint8), None  # what there was goes first
        if locked:
            torch = sys.modules["torch"]
            self._owner = torch.empty(self.size, dtype=torch.uint8, pin_memory=True)
            self._memory = self._owner.numpy()
        else:
            self._memory = np.empty(self.size, np.uint8)

    @property
    def total(self) -> int:
        """How many bytes the two files have together."""
        return len(self._header) + self.size + len(self.structure)

    def pieces(self) -> Iterator[bytes | memoryview]:
        """The safetensors file."""
        yield self._header
        for start in range(0, self.size, _CHUNK):
            yield self._memory[start : min(start + _CHUNK, self.size)].data


def _copy(leaf: Leaf, into: np.ndarray[Any, Any]) -> None:
    if leaf.size == 0:
        return
    if leaf.torch:
        torch = sys.modules["torch"]
        target = torch.from_numpy(into).view(leaf.value.dtype).view(leaf.shape)
        target.copy_(leaf.value.detach(), non_blocking=leaf.value.is_cuda)
    else:
        np.copyto(into.view(leaf.value.dtype).reshape(leaf.shape), leaf.value)


class _Packer:
    """Walks a state and collects its tensors."""

    def __init__(self, called: str) -> None:
        self.leaves: dict[Any, Leaf] = {}
        self._called = called
        self._names = {"__metadata__"}
        self._torch = sys.modules.get("torch")  # without it there are no tensors of its

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
        if kind is np.ndarray or isinstance(value, np.generic):
            return self._numpy(value, path, name)
        if self._torch is not None and kind in (self._torch.Tensor, self._torch.nn.Parameter):
            return self._tensor(value, path, name)
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

    def _numpy(self, value: Any, path: str, name: str) -> Any:
        dtype = value.dtype
        if dtype.hasobject or np.dtype(dtype.str) != dtype:
            raise BadSetting(f"{path} is a NumPy value of dtype {dtype}, which a checkpoint can't hold.", path=path)
        if isinstance(value, np.generic):
            return {"scalar": np.asarray(value).tobytes().hex(), "dtype": dtype.str}
        code = weights.CODES.get(dtype.name) if dtype.isnative else None
        leaf = Leaf(self._free(name), value, False, dtype.str, code, value.shape, max(1, dtype.itemsize), value.nbytes)
        self.leaves[len(self.leaves)] = leaf
        return {"numpy": leaf.name, "dtype": leaf.dtype, "shape": list(leaf.shape)}

    def _tensor(self, value: Any, path: str, name: str) -> Any:
        assert self._torch is not None
        if value.layout is not self._torch.strided or value.is_quantized or value.is_meta:
            raise BadSetting(
                f"{path} is a {value.dtype} tensor of layout {value.layout} on {value.device}, which a checkpoint "
                "can't hold.",
                path=path,
            )
        # The same memory under two names (tied weights) is written once.
        bits = (value.is_conj(), value.is_neg())
        view = (value.data_ptr(), value.device, value.dtype, value.shape, value.stride(), *bits)
        key: Any = view if value.numel() else len(self.leaves)
        if key not in self.leaves:
            dtype = str(value.dtype).removeprefix("torch.")
            width = value.element_size()
            shape, code = tuple(value.shape), weights.CODES.get(dtype)
            self.leaves[key] = Leaf(self._free(name), value, True, dtype, code, shape, width, value.numel() * width)
        leaf = self.leaves[key]
        node = {"torch": leaf.name, "dtype": leaf.dtype, "shape": list(leaf.shape)}
        if type(value) is not self._torch.Tensor:
            node["parameter"] = value.requires_grad
        return node

    def _free(self, name: str) -> str:
        wanted = name.removeprefix(".") or "state"
        found, number = wanted, 2
        while found in self._names:
            found, number = f"{wanted}#{number}", number + 1
        self._names.add(found)
        return found


def unpack(structure: bytes | bytearray, tensors: bytearray) -> Any:
    """The state. Its tensors and arrays are views of `tensors` and can be written to; all are on the CPU."""
    found, _ = weights.entries(tensors)
    return _Unpacker(tensors, found).value(_tree(structure))


def outline(structure: bytes | bytearray) -> Any:
    """The state without its tensors and arrays, each of which is None."""
    return _Outline(bytearray(), {}).value(_tree(structure))


def _tree(structure: bytes | bytearray) -> Any:
    body = json.loads(structure)
    if body.get("format") != 1:
        raise ModelError(f"This state has format {body.get('format')!r}, and this Tritium reads format 1.")
    return body["state"]


class _Unpacker:
    def __init__(self, buffer: bytearray, found: Mapping[str, weights.Entry]) -> None:
        self._buffer = buffer
        self._found = found
        self._made: dict[Any, Any] = {}

    def value(self, node: Any) -> Any:
        if isinstance(node, list):
            return [self.value(item) for item in node]
        if not isinstance(node, dict):
            return node
        kind, inner = next(iter(node.items()))
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
        """A tensor or an array."""
        if kind not in ("torch", "numpy") or inner not in self._found:
            raise ModelError(f"The state holds {kind!r} {str(inner)[:80]!r}, which is not known here.")
        key = (inner, node.get("parameter"))
        if key not in self._made:
            self._made[key] = self._torch(inner, node) if kind == "torch" else self._numpy(inner, node)
        return self._made[key]

    def _torch(self, name: str, node: Mapping[str, Any]) -> Any:
        tensor = weights.tensor(self._buffer, name, self._found[name], node["dtype"], node["shape"])
        if "parameter" in node:
            return sys.modules["torch"].nn.Parameter(tensor, requires_grad=node["parameter"])
        return tensor

    def _numpy(self, name: str, node: Mapping[str, Any]) -> Any:
        entry, dtype = self._found[name], np.dtype(node["dtype"])
        count = math.prod(node["shape"])
        if entry.end - entry.start != count * dtype.itemsize:
            raise ModelError(f"The array {name!r} has {entry.end - entry.start} bytes for {count} of {dtype}.")
        if entry.end == entry.start:
            return np.empty(node["shape"], dtype)
        return np.frombuffer(self._buffer, dtype, count, entry.start).reshape(node["shape"])


class _Outline(_Unpacker):
    def leaf(self, kind: str, inner: Any, node: Mapping[str, Any]) -> Any:
        return None
