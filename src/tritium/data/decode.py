"""The arrays that a function or a dataset of the user's has for the values of a column (any process)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from tritium.data.schema import Content, Data, Field, by_column
from tritium.data.spool import Array, Ragged
from tritium.data.types import SourceType
from tritium.errors import BadRow

Decode = Any
"""A function from a value to an array, or a map-style dataset of arrays."""
UNDECODED = (
    "only columns of bytes, strings and integers are decoded, each as an input of its own, not packed with others."
)
_SHOWN_BYTES = 16
"""The bytes of a value that a message shows."""
_SHOWN_CHARACTERS = 200
"""The characters of a string that a message shows."""
_KEPT = 1024
"""The bytes or characters of either that the error keeps in `value`."""


def content_of(kind: SourceType) -> Content | None:
    """Return the content of a column of this type, for the function that decodes it; None: it can't be decoded."""
    if kind.name == "binary":
        return "bytes"
    if kind.name == "string":
        return "string"
    if kind.name == "image":
        return "image"
    return "integer" if kind.name == "number" and kind.dtype.lstrip("u").startswith("int") else None


def raw_values(values: Any) -> list[Any] | None:
    """Return values that a function decodes, as a list: strings, bytes or integers; None for anything else."""
    if getattr(values, "ndim", 1) != 1:
        return None
    items = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(items, list | tuple) or not items:
        return None
    return list(items) if content_of_values(items) is not None else None


def content_of_values(values: Sequence[Any]) -> Content | None:
    """Return the content of these values, for the function that decodes them; None for another type, or several."""
    kinds: tuple[tuple[Content, type], ...] = (("string", str), ("bytes", bytes), ("integer", int))
    fits = (name for name, kind in kinds if all(isinstance(v, kind) and not isinstance(v, bool) for v in values))
    return next(fits, None)


def decode_problems(given: Mapping[str, Any], batch: str, source: str, kind: SourceType) -> Iterator[str]:
    """Yield a sentence for each error of the settings of a column that is decoded.

    given : setting → its value for this column.
    """
    decode = given["decode"]
    if given["dtype"] is not None:
        yield f"column {source!r} is decoded: decode={{{batch!r}: function}} decides its dtype, not `dtype`."
    if given["nulls"] is not None:
        yield f"column {source!r} is decoded, and a null in it can't be filled. Drop those rows."
    if given["vocabulary"] is not None or given["hash_buckets"] is not None:
        yield f"column {source!r} is a string with both decode and a vocabulary or hash_buckets. Choose one."
    if decode is not None and not callable(decode) and content_of(kind) != "integer":
        yield (
            f"decode for {batch!r} is a dataset, which is read by an index, and column {source!r} is {kind.text}. Give "
            f"a column of integers, or a function: decode={{{batch!r}: function}}."
        )


@dataclass(frozen=True)
class Decoder:
    """The function that decodes a column, and the number of threads in which a batch is decoded."""

    function: Decode
    threads: int = 1
    column: str = ""
    """The source column, for messages."""
    content: Content = "bytes"
    """The kind of values that the function takes."""
    users: Decode | None = None
    """The user's own part of the function: None for images as they are."""

    def __call__(self, content: bytes) -> Any:
        """Return the array of one value, as it came through the exchange."""
        return _called(self.function, _value(content, self.content))

    def batch(self, rows: Ragged, bad: Callable[[int, str, Any], BadRow]) -> Array:
        """Return the arrays `[rows, *shape]` of a batch; see `decoded`."""
        contents = contents_of(rows, self.content)
        if self.threads == 1 or len(contents) == 1:
            return decoded(self.function, contents, bad)
        with ThreadPoolExecutor(self.threads, "tritium-decode") as pool:
            return decoded(self.function, contents, bad, pool=pool)


def decoders(data: Data) -> dict[str, Decoder]:
    """Return the functions of `data.decode` with their threads."""
    return {name: Decoder(function, data.decode_threads) for name, function in data.decode.items()}


def by_batch_column(decode: Mapping[str, Decode], fields: Sequence[Field]) -> dict[str, Decoder]:
    """Return batch column → its Decoder, of functions by the names of batch columns or of source columns."""
    read = {source for field in fields for source in field.sources}
    decoders_by_name = {}
    for field in fields:
        asked = by_column(decode, field.name, field.sources[0], read)
        users, threads = (asked.function, asked.threads) if isinstance(asked, Decoder) else (asked, 1)
        function = of_images(users) if field.content == "image" else users
        if function is not None:
            decoders_by_name[field.name] = Decoder(function, threads, field.sources[0], field.content, users)
    return decoders_by_name


def of_images(decode: Decode | None) -> Callable[[bytes], Any]:
    """Return the function from an image as it comes through the exchange to its array, by `decode` where it is given.

    `decode` takes the image as an array, to give it another size, say.
    """
    return image_of if decode is None else lambda raw: _called(decode, image_of(raw))


def raw_image(height: int, width: int, channels: int, mode: int, values: bytes) -> bytes:
    """Return an image as it comes through the exchange."""
    return b"%d,%d,%d,%d;%b" % (height, width, channels, mode, values)


def image_of(raw: bytes) -> Array:
    """Return an image as uint8 `[height, width, channels]`. Raises ValueError for one that is not of bytes."""
    size, _, values = raw.partition(b";")
    height, width, channels, mode = map(int, size.split(b","))
    if height < 0:
        raise ValueError("Spark could not read this image; with its option dropInvalid it leaves such files out")
    if mode & 7:  # These bits are OpenCV's number for the type of a value, which is 0 for a byte.
        raise ValueError(f"an image of mode {mode} does not hold bytes")
    return np.frombuffer(values, np.uint8).reshape(height, width, channels)


def contents_of(rows: Ragged, content: Content) -> list[Any]:
    """Return the values of a column that came through the exchange as bytes."""
    return [_value(row.tobytes(), content) for row in rows.rows()]


def _value(raw: bytes, content: Content) -> Any:
    if content == "string":
        return raw.decode(errors="surrogateescape")  # Python decodes file names that are no UTF-8 so, too.
    return int(raw) if content == "integer" else raw


def decoded(
    decode: Decode,
    contents: Sequence[Any],
    bad: Callable[[int, str, Any], BadRow],
    *,
    shape: tuple[int | None, ...] | None = None,
    pool: Executor | None = None,
) -> Array:
    """Return the arrays `[rows, *shape]` of these contents, of which there is at least one.

    bad   : makes the error for a row of `contents`, of its number, the reason, and its value.
    shape : that of every row, None in it for a length that varies from batch to batch; None: that of the first row.
    pool  : threads in which the rows are decoded; None: in this one.

    Raises BadRow for the first row where `decode` fails, or gives another shape or dtype than for the one before it.
    """
    calls = [pool.submit(_called, decode, content) for content in contents] if pool is not None else None
    arrays: list[Array] = []
    for row, content in enumerate(contents):
        try:
            array = np.asarray(_called(decode, content) if calls is None else calls[row].result())
        except Exception as error:
            raise _error(bad, row, content, f"decode raised {type(error).__name__}: {error}") from error
        if array.dtype.hasobject:
            kind = f"a {type(array[()]).__name__}" if array.ndim == 0 else "an array of objects"
            raise _error(bad, row, content, f"decode gave {kind}, and must give one array of numbers")
        if arrays and (array.shape, array.dtype) != (arrays[0].shape, arrays[0].dtype):
            raise _error(
                bad,
                row,
                content,
                f"decode gave {array.dtype} of shape {array.shape}, and {arrays[0].dtype} of shape "
                f"{arrays[0].shape} for a row before it: a batch needs one shape",
            )
        if shape is not None and not _fits(array.shape, shape):
            expected = tuple("?" if n is None else n for n in shape)
            raise _error(bad, row, content, f"decode gave shape {array.shape}, and the model takes {expected}")
        arrays.append(array)
    return np.stack(arrays)


def _fits(shape: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    return len(shape) == len(wanted) and all(w in (None, n) for w, n in zip(wanted, shape, strict=True))


def _called(decode: Decode, value: Any) -> Any:
    """Return the result of a function for a value, or the item of a dataset at this index."""
    if callable(decode):
        return decode(value)
    if not 0 <= value < len(decode):  # A negative index would count from the end.
        raise IndexError(f"index {value}, and the dataset has {len(decode):,} rows")
    item = decode[value]
    if isinstance(item, tuple):
        raise TypeError(
            f"the dataset has a tuple of {len(item)} at index {value}, and a column is one array: give a function of "
            "the index that returns one of them"
        )
    return item


def _error(bad: Callable[[int, str, Any], BadRow], row: int, content: Any, why: str) -> BadRow:
    if isinstance(content, int):
        return bad(row, f"value {content}: {why}", content)
    if isinstance(content, str):
        start = repr(content[:_SHOWN_CHARACTERS]) + ("…" if len(content) > _SHOWN_CHARACTERS else "")
        return bad(row, f"value {start}: {why}", content[:_KEPT])
    start = repr(content[:_SHOWN_BYTES]) + ("…" if len(content) > _SHOWN_BYTES else "")
    return bad(row, f"{len(content)} bytes {start}: {why}", content[:_KEPT])
