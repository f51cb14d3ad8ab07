"""The arrays that a function of the user's makes of the bytes in a column (any process)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tritium.data.schema import Data, Field, by_column
from tritium.data.spool import Array
from tritium.errors import BadRow

Decode = Callable[[bytes], Any]
_SHOWN = 16  # bytes of a content in a message
_KEPT = 1024  # and in the error's `value`


@dataclass(frozen=True)
class Decoder:
    """A function from the bytes of a column to an array, and the number of threads in which a batch is decoded."""

    function: Decode
    threads: int = 1
    column: str = ""
    """The source column, for messages."""

    def __call__(self, content: bytes) -> Any:
        """Return the array of one value."""
        return self.function(content)

    def batch(self, contents: Sequence[bytes], bad: Callable[[int, str, bytes], BadRow]) -> Array:
        """Return the arrays `[rows, *shape]` of a batch; see `decoded`."""
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
    found = {}
    for field in fields:
        given = by_column(decode, field.name, field.sources[0], read)
        if given is not None:
            known = given if isinstance(given, Decoder) else Decoder(given)
            found[field.name] = replace(known, column=field.sources[0])
    return found


def decoded(
    decode: Decode,
    contents: Sequence[bytes],
    bad: Callable[[int, str, bytes], BadRow],
    *,
    shape: tuple[int | None, ...] | None = None,
    pool: Executor | None = None,
) -> Array:
    """Return the arrays `[rows, *shape]` of these contents, of which there is at least one.

    bad   : makes the error for a row of `contents`: its number, why it can't be used, and its value.
    shape : that of every row, None in it for a length that varies from batch to batch; None: that of the first row.
    pool  : threads in which the rows are decoded; None: in this one.

    Raises BadRow for the first row where `decode` fails, or gives another shape or dtype than for the one before it.
    """
    calls = [pool.submit(decode, content) for content in contents] if pool is not None else None
    arrays: list[Array] = []
    for row, content in enumerate(contents):
        try:
            array = np.asarray(decode(content) if calls is None else calls[row].result())
        except Exception as error:
            raise _error(bad, row, content, f"decode raised {type(error).__name__}: {error}") from error
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


def _error(bad: Callable[[int, str, bytes], BadRow], row: int, content: bytes, why: str) -> BadRow:
    start = repr(content[:_SHOWN]) + ("…" if len(content) > _SHOWN else "")
    return bad(row, f"{len(content)} bytes {start}: {why}", content[:_KEPT])
