"""Tensors in the safetensors format, written as a stream and read as a memory map (any process).

The library of that name is not needed on the executors, writes only to local paths, and refuses weights that are tied;
the format is a length, a JSON header and the bytes. What is written here it reads, and the other way round (tested).
"""

from __future__ import annotations

import hashlib
import json
import mmap
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tritium.errors import BadSetting, ModelError

if TYPE_CHECKING:
    import torch

NAMES = {
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
CODES = {name: code for code, name in NAMES.items()}
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

    def checksums(self) -> tuple[int, ...]:
        """A CRC-32 of each part of the file: it tells whether a weight has changed, in a third of a digest's time.

        It reads what is there, because torch's own counter misses what is written through `.data` or NumPy. One
        number that changed always gives another CRC; several do but for one case in 2³² for each part.
        """
        return tuple(zlib.crc32(piece) for piece in self.stream())

    def stream(self) -> Iterator[memoryview]:
        """The file, piece by piece; never more than one tensor is copied, and none that is on the CPU already."""
        import torch

        order = sorted(self.named, key=lambda n: (-self.named[n].element_size(), n))  # wide first: all aligned
        tensors = ((name, self.named[name]) for name in order)
        sizes = ((name, str(_code(t)), t.shape, t.numel() * t.element_size()) for name, t in tensors)
        yield memoryview(header(sizes, {"format": "pt", "tied": json.dumps(self.tied)}))
        for name in order:
            flat = self.named[name].detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
            if flat.numel():
                data: Any = flat.view(torch.uint8).numpy()
                for start in range(0, len(data), _CHUNK):
                    yield memoryview(data[start : start + _CHUNK])


def _code(tensor: torch.Tensor) -> str | None:
    return CODES.get(str(tensor.dtype).removeprefix("torch."))


def header(tensors: Iterable[tuple[str, str, Sequence[int], int]], metadata: Mapping[str, str]) -> bytes:
    """The first bytes of a file whose tensors (name, code, shape, bytes) follow in this order."""
    fields: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, code, shape, size in tensors:
        fields[name] = {"dtype": code, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: its code, its shape, and where in the file its bytes are."""

    code: str
    shape: list[int]
    start: int
    end: int


def entries(buffer: mmap.mmap | bytearray) -> tuple[dict[str, Entry], dict[str, str]]:
    """What a file says of its tensors, and its metadata; ModelError when it is no such file."""
    size = len(buffer)
    length = struct.unpack_from("<Q", buffer)[0] if size >= 8 else 0
    if not 2 <= length <= min(size - 8, _LONGEST_HEADER):
        raise ModelError(f"The weights are no safetensors file: {size} bytes with a header of {length}.")
    fields: dict[str, Any] = json.loads(bytes(buffer[8 : 8 + length]))
    metadata = fields.pop("__metadata__", {})
    found: dict[str, Entry] = {}
    for name, entry in fields.items():
        if entry["dtype"] not in NAMES:
            raise ModelError(f"The weights hold {name!r} as {entry['dtype']!r}, a dtype that is not known here.")
        start, end = entry["data_offsets"]
        if not 0 <= start <= end <= size - 8 - length:
            raise ModelError(f"The weights are cut short or damaged at {name!r}: bytes {start} to {end} of {size}.")
        found[name] = Entry(entry["dtype"], entry["shape"], 8 + length + start, 8 + length + end)
    return found, metadata


def read(buffer: mmap.mmap | bytearray) -> dict[str, torch.Tensor]:
    """Tensors by name as views of `buffer` (writable; a private map copies only the pages that are written)."""
    found, metadata = entries(buffer)
    tensors = {name: tensor(buffer, name, entry, NAMES[entry.code], entry.shape) for name, entry in found.items()}
    for name, other in json.loads(metadata.get("tied", "{}")).items():
        tensors[name] = tensors[other]
    return tensors


def tensor(buffer: mmap.mmap | bytearray, name: str, entry: Entry, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    """One tensor of a file, as a view of `buffer`."""
    import torch

    kind: torch.dtype = getattr(torch, dtype)
    size = entry.end - entry.start
    if _product(shape) * kind.itemsize != size:
        raise ModelError(
            f"The weights are cut short or damaged at {name!r}: {size} bytes for {dtype} of the shape {list(shape)}."
        )
    if size == 0:
        return torch.empty(list(shape), dtype=kind)
    return torch.frombuffer(buffer, dtype=kind, count=size // kind.itemsize, offset=entry.start).view(list(shape))


def _product(shape: Sequence[int]) -> int:
    total = 1
    for n in shape:
        total *= n
    return total


def open_map(path: str) -> dict[str, torch.Tensor]:
    """The tensors of a local file without reading it: processes that map the same file share its memory."""
    with open(path, "rb") as file:
        return read(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
