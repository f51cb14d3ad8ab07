"""The safetensors format: the header of a file, written and read (any process).

The library of that name would have to be on the executors, writes only to local paths, and refuses tied weights; the
format is a length, a JSON header and the bytes. Either reads what the other writes (tested).
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tritium.errors import MALFORMED, ModelError
from tritium.model.forms import TEXT, WHOLE, list_of, mapping_of

_PIECE = 4 << 20

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
_LONGEST_HEADER = 100_000_000  # The format sets this limit.


def header(tensors: Iterable[tuple[str, str, Sequence[int], int]], metadata: Mapping[str, str]) -> bytes:
    """Return the first bytes of a file whose tensors (name, code, shape, bytes) follow in this order."""
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
    """One tensor of a file: its code, its shape, and the offsets of its bytes in the file."""

    code: str
    shape: list[int]
    start: int
    end: int


def entries(buffer: mmap.mmap | bytearray) -> tuple[dict[str, Entry], dict[str, str]]:
    """Return the tensors' entries by name, and the metadata of a file. Raises ModelError for any other file."""
    size = len(buffer)
    length = struct.unpack_from("<Q", buffer)[0] if size >= 8 else 0
    if not 2 <= length <= min(size - 8, _LONGEST_HEADER):
        raise ModelError(f"The weights are no safetensors file: {size} bytes with a header of {length}.")
    try:
        return _entries(json.loads(bytes(buffer[8 : 8 + length])), size - 8 - length, 8 + length)
    except MALFORMED as error:
        raise ModelError(f"The header of the weights is damaged: {error!r:.200}.") from error


def _entries(fields: dict[str, Any], size: int, first: int) -> tuple[dict[str, Entry], dict[str, str]]:
    """Return the entries of a header; the tensors have `size` bytes, and begin at the offset `first`."""
    metadata = fields.pop("__metadata__", {})
    if not mapping_of(TEXT).fits(metadata):
        raise ModelError(f"The header of the weights is damaged: its metadata is {metadata!r:.100}.")
    by_name: dict[str, Entry] = {}
    for name, entry in fields.items():
        if entry["dtype"] not in NAMES:
            raise ModelError(f"The weights hold {name!r} as {entry['dtype']!r}, a dtype that is not known here.")
        start, end = entry["data_offsets"]
        count_of([start, end, *entry["shape"]])
        if not start <= end <= size:
            raise ModelError(f"The weights are cut short or damaged at {name!r}: bytes {start} to {end} of {size}.")
        by_name[name] = Entry(entry["dtype"], entry["shape"], first + start, first + end)
    return by_name, metadata


def count_of(shape: Any) -> int:
    """Return the number of elements of a shape that was read. Raises ModelError unless it is a list of lengths."""
    if not list_of(WHOLE).fits(shape):
        raise ModelError(f"The shape of a tensor is damaged: {shape!r:.100}.")
    return math.prod(shape)


def pieces(views: Iterable[memoryview]) -> Iterator[bytes]:
    """Yield pieces of at most 4 MiB for `world.store`, without a second copy of the weights."""
    for view in views:
        for start in range(0, len(view), _PIECE):
            yield bytes(view[start : start + _PIECE])
