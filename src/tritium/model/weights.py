"""Tensors in the safetensors format, written as a stream and read as a memory map (any process).

The library of that name is not needed on the executors, writes only to local paths, and refuses weights that are tied;
the format is a length, a JSON header and the bytes. What is written here it reads, and the other way round (tested).
"""

from __future__ import annotations

import hashlib
import json
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tritium.errors import BadSetting, ModelError

if TYPE_CHECKING:
    import torch

_CODES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "C64": "complex64",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
_NAMES = {name: code for code, name in _CODES.items()}
_CHUNK = 64 << 20
_LONGEST_HEADER = 100_000_000  # the format's own limit


@dataclass(frozen=True)
class Tensors:
    """A module's parameters and buffers by name, each once, and the other names of those that are tied."""

    named: dict[str, torch.Tensor]
    tied: dict[str, str]

    @classmethod
    def of(cls, module: torch.nn.Module) -> Tensors:
        """The module's own tensors, not copies."""
        import torch

        named: dict[str, torch.Tensor] = {}
        tied: dict[str, str] = {}
        first: dict[int, str] = {}
        for name, value in module.state_dict(keep_vars=True).items():
            if not isinstance(value, torch.Tensor):
                raise BadSetting(
                    f"{name!r} in the module's state is a {type(value).__name__}, no tensor (get_extra_state). "
                    "A model holds tensors; keep other state as attributes of the module."
                )
            if value.layout is not torch.strided or value.is_quantized or value.is_meta or _code(value) is None:
                raise BadSetting(
                    f"{name!r} is a {value.dtype} tensor of layout {value.layout} on {value.device}, which "
                    "safetensors can't hold."
                )
            if id(value) in first:
                tied[name] = first[id(value)]
            else:
                first[id(value)] = name
                named[name] = value
        return cls(named, tied)

    def digest(self) -> str:
        """The hash of the file that they make."""
        checksum = hashlib.sha256()
        for piece in self.stream():
            checksum.update(piece)
        return checksum.hexdigest()[:32]

    def version(self) -> tuple[tuple[int, int], ...] | None:
        """Changes whenever torch writes to one of them; None where torch does not count."""
        if any(t.is_inference() for t in self.named.values()):
            return None
        return tuple((t.data_ptr(), t._version) for t in self.named.values())

    def stream(self) -> Iterator[memoryview]:
        """The file, piece by piece; never more than one tensor is copied, and none that is on the CPU already."""
        import torch

        order = sorted(self.named, key=lambda n: (-self.named[n].element_size(), n))  # wide first: all aligned
        header: dict[str, Any] = {"__metadata__": {"format": "pt", "tied": json.dumps(self.tied)}}
        offset = 0
        for name in order:
            tensor = self.named[name]
            end = offset + tensor.numel() * tensor.element_size()
            header[name] = {"dtype": _code(tensor), "shape": list(tensor.shape), "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        yield memoryview(struct.pack("<Q", len(text)) + text)
        for name in order:
            flat = self.named[name].detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
            if flat.numel():
                data: Any = flat.view(torch.uint8).numpy()
                for start in range(0, len(data), _CHUNK):
                    yield memoryview(data[start : start + _CHUNK])


def _code(tensor: torch.Tensor) -> str | None:
    return _NAMES.get(str(tensor.dtype).removeprefix("torch."))


def read(buffer: mmap.mmap | bytearray) -> dict[str, torch.Tensor]:
    """Tensors by name as views of `buffer` (writable; a private map copies only the pages that are written)."""
    import torch

    size = len(buffer)
    length = struct.unpack_from("<Q", buffer)[0] if size >= 8 else 0
    if not 2 <= length <= min(size - 8, _LONGEST_HEADER):
        raise ModelError(f"The weights are no safetensors file: {size} bytes with a header of {length}.")
    header: dict[str, Any] = json.loads(bytes(buffer[8 : 8 + length]))
    metadata = header.pop("__metadata__", {})
    found: dict[str, torch.Tensor] = {}
    for name, entry in header.items():
        if entry["dtype"] not in _CODES:
            raise ModelError(f"The weights hold {name!r} as {entry['dtype']!r}, a dtype that is not known here.")
        dtype: torch.dtype = getattr(torch, _CODES[entry["dtype"]])
        start, end = entry["data_offsets"]
        count = (end - start) // dtype.itemsize
        if not 0 <= start <= end <= size - 8 - length or _product(entry["shape"]) * dtype.itemsize != end - start:
            raise ModelError(f"The weights are cut short or damaged at {name!r}: bytes {start} to {end} of {size}.")
        if count == 0:
            found[name] = torch.empty(entry["shape"], dtype=dtype)
        else:
            flat = torch.frombuffer(buffer, dtype=dtype, count=count, offset=8 + length + start)
            found[name] = flat.view(entry["shape"])
    for name, other in json.loads(metadata.get("tied", "{}")).items():
        found[name] = found[other]
    return found


def _product(shape: list[int]) -> int:
    total = 1
    for n in shape:
        total *= n
    return total


def open_map(path: str) -> dict[str, torch.Tensor]:
    """The tensors of a local file without reading it: processes that map the same file share its memory."""
    with open(path, "rb") as file:
        return read(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
