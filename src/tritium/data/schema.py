"""`Data`, the columns to read from a DataFrame, and `Field`, a column of a batch (any process)."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as setting
from typing import Any, Literal, TypeVar

from tritium.errors import BadSetting

Kind = Literal["fixed", "bytes"]
Content = Literal["bytes", "string", "integer", "image"]
Fill = float | int | str | None
T = TypeVar("T")

DENSE_BYTES = 256 << 10
"""The most bytes that a sparse vector may take as a dense row: 65,536 float32."""
Shapes = Mapping[str, Mapping[str, Sequence[int]]]
"""Name of the data → batch column → the shape of one row."""

BY_COLUMN = ("vocabulary", "hash_buckets", "pad", "decode", "nulls", "normalize")


@dataclass(frozen=True)
class Data:
    """A DataFrame, and how its columns become the columns of a batch.

    The keys of every mapping are names of batch columns; `vocabulary`, `hash_buckets`, `pad`, `decode`, `nulls` and
    `normalize` also take names of source columns, and a name that is both means the source column. Raises BadSetting
    where one of these six is not a mapping.
    """

    frame: Any
    """A Spark DataFrame (classic or Connect), a pandas DataFrame or a pyarrow Table."""
    columns: Mapping[str, str | Sequence[str]] | Sequence[str] | None = None
    """Batch column → one source column, or several scalars packed to a row `[n]`. None: every column."""
    dtype: Mapping[str, str] | str | None = None
    """The numpy dtype per batch column, or one for all packed and floating ones: the only way to lose precision."""
    default_dtype: Mapping[str, str] | str | None = None
    """The dtype where `dtype` asks for none: per batch column, or one for all floating ones. An integer that it does
    not hold exactly (float32 from 2**24 on) raises BadRow; with `dtype` it is rounded."""
    vocabulary: Mapping[str, Sequence[str]] = setting(default_factory=dict)
    """String column → its known values; the batch has their index (int64)."""
    unknown_words: Literal["error", "keep"] = "error"
    """Whether a value that is not in its vocabulary raises BadRow, or has the index after the last one's ("keep")."""
    hash_buckets: Mapping[str, int] = setting(default_factory=dict)
    """String column → n; the batch has crc32(UTF-8) mod n (int64), the same on every machine."""
    pad: Mapping[str, int | tuple[int, float]] = setting(default_factory=dict)
    """Array of varying length → its fixed length, or (length, fill); fill is 0. A longer row raises BadRow."""
    decode: Mapping[str, Any] = setting(default_factory=dict)
    """Column of bytes, strings or integers → a function from its value to an array, called in the rank when a batch is
    made. For integers also a map-style dataset, of which each is the index: `dataset[i]` is the array."""
    decode_threads: int = 1
    """The threads of a rank in which the rows of a batch are decoded at once, for a function that releases Python's
    lock, as those of Pillow and OpenCV do. Ranks have their own."""
    nulls: Mapping[str, float | int | str] = setting(default_factory=dict)
    """Column → the value in place of null, or "mask" (0, and a bool column `<name>_mask`: True = present)."""
    nan: Literal["error", "keep"] | Mapping[str, Literal["error", "keep"]] = "error"
    """Whether NaN and infinity in a floating column raise BadRow or are ordinary values; a mapping says so per batch
    column, and "error" holds for those that it does not name."""
    on_error: Literal["fail", "skip"] = "fail"
    """Whether a row that can't be read (for a null, a NaN, an unknown word, an array of another length) raises BadRow,
    or is left out and counted in the report ("skip")."""
    normalize: Mapping[str, tuple[Any, Any]] = setting(default_factory=dict)
    """Column that becomes floating → (mean, standard deviation), by which the batch has (value - mean) / deviation: two
    numbers, or for an array two sequences. They are of its values after `nulls`. Estimators learn them."""
    shuffle: Literal["full", "stream"] | bool = "full"
    """The order that the exchange prepares: "full" and False sort the rows by id, "stream" does not."""
    row_key: Sequence[str] | str = ()
    """Columns that identify a row. Rows are sorted by them within their source partition before they get their ids, so
    that a row has the same id when Spark computes a join or an aggregation again, and a resumed epoch is exact."""
    together: str | None = None
    """A column that is read too: rows with equal values of it go to one rank, as the documents of one query must for a
    ranking. Ranks then have as many rows as these groups give them, not equally many. A null in it raises BadRow."""
    where: tuple[str, bool] | None = None
    """A boolean column, and the value that it has in the rows to read; a null in it is an error. Two names that read
    one frame, for True and for False, are read in one evaluation of it, so that each row is in exactly one of them,
    also where the column is drawn at random or Spark orders the rows otherwise each time."""

    def __post_init__(self) -> None:
        wrong = []
        for name in BY_COLUMN:
            value = getattr(self, name)
            if not isinstance(value, Mapping):
                shown = getattr(value, "__name__", repr(value))
                wrong.append(f"{name}={shown} must be a mapping from columns: {name}={{'x': {shown}}}.")
        for column, function in self.decode.items() if isinstance(self.decode, Mapping) else ():
            if not callable(function) and not is_dataset(function):
                wrong.append(f"decode={{{column!r}: {shown_decode(function)}}} {NO_DECODE}")
        if isinstance(self.decode_threads, bool) or not isinstance(self.decode_threads, int) or self.decode_threads < 1:
            wrong.append(f"decode_threads={self.decode_threads!r} must be a whole number of at least 1.")
        if wrong:
            raise BadSetting("tr.Data: " + " ".join(wrong), settings=wrong)

    @property
    def keys(self) -> tuple[str, ...]:
        """The columns of `row_key`."""
        return (self.row_key,) if isinstance(self.row_key, str) else tuple(self.row_key)


@dataclass(frozen=True, kw_only=True)
class Field:
    """A batch column: its sources, and the dtype and shape of its rows."""

    name: str
    sources: tuple[str, ...]
    """Source columns; more than one only where scalars are packed to one row."""
    kind: Kind
    dtype: str
    """The numpy dtype in the batch ("uint8" for bytes)."""
    shape: tuple[int, ...] | None
    """Shape of one row: () is a scalar, so that the batch is `[b]`; None until the first row is read."""
    depth: int = 0
    """The number of arrays around a value: 0 for a scalar, 1 for a vector or packed scalars, 2 for a matrix."""
    packed: bool = False
    """Whether scalars travel as one array; value i of a row then comes from `sources[i]`."""
    travel: str = ""
    """The numpy dtype in which the values leave the JVM; "" for strings and bytes."""
    vocabulary: tuple[str, ...] | None = None
    unknown: bool = False
    """Whether a word that is not in the vocabulary has the index after the last one's."""
    buckets: int | None = None
    pad: tuple[int, float] | None = None
    nulls: tuple[Fill, ...] = (None,)
    """Per source: the fill value, "mask", or None (a null raises BadRow)."""
    nan: Literal["error", "keep"] = "error"
    exact: tuple[bool, ...] = ()
    """Per source: whether it holds integers, each of which must be exact in `dtype`; () for none."""
    asked: bool = False
    """Whether the user asked for `dtype`, so that what it does not hold exactly is rounded."""
    content: Content = "bytes"
    """The content of a value of kind "bytes": bytes, the UTF-8 of a string, the digits of an integer, or an image of
    Spark's behind its size, as `exchange.pack` makes it."""
    skip: bool = False
    """Whether a row that can't be read is left out, instead of raising BadRow."""
    slots: tuple[str, ...] = ()
    """The names that a vector column's metadata gives its numbers, as VectorAssembler makes it; () for none."""
    mean: tuple[float, ...] = ()
    """The numbers that are subtracted from the values of a row, or one from all of them; (): none."""
    std: tuple[float, ...] = ()
    """The numbers by which the differences are divided."""
    marked: bool = False
    """Whether a row may be a mark in place of values that can't be packed: see `exchange.pack`."""

    @property
    def mask(self) -> bool:
        """Whether a bool column `<name>_mask` of the same shape goes with this one."""
        return "mask" in self.nulls

    @property
    def source_names(self) -> str:
        """The names of the source columns, at most 8 of them, for messages."""
        return ", ".join(map(repr, self.sources[:8])) + (", …" if len(self.sources) > 8 else "")

    def described(self, values: str) -> str:
        """Return the column with this text of its values: `label [batch, 1] float32 of column 'cnt'`."""
        return f"{self.name} {values} of column{'s' * (len(self.sources) > 1)} {self.source_names}"

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a dict that JSON takes."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Field:
        """Return the Field of `to_json`, in which JSON has turned tuples into lists."""
        facts: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in plain.items()}
        return cls(**facts)


def by_column(setting: Mapping[str, T], batch: str, source: str, read: Collection[str]) -> T | None:
    """Return the value of a setting of `Data` for a batch column that comes from a source column, else None.

    read : all source columns of this Data. A name among them means that source, wherever it goes, and no batch column.
    """
    if batch in setting and batch not in read:
        return setting[batch]
    return setting.get(source)


def is_dataset(thing: Any) -> bool:
    """Return whether `thing` is a map-style dataset: no function, with a length and an item for each index."""
    if callable(thing) or isinstance(thing, Mapping | str | bytes):
        return False
    return hasattr(thing, "__getitem__") and hasattr(thing, "__len__")


def shown_decode(thing: Any) -> str:
    """Return a short text for a value of `decode`, for messages."""
    return f"{thing!r:.80}"


NO_DECODE = "is neither a function from a value to an array, nor a dataset with __getitem__ and __len__."


def as_data(value: Any) -> Data:
    """Return `value` itself where it is Data, else Data of this frame."""
    return value if isinstance(value, Data) else Data(value)
