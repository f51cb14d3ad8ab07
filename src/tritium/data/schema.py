"""What is read from a DataFrame, and the plan of its batch columns, made before the start (any process)."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as setting
from typing import Any, Literal

import numpy as np

from tritium.data import narrow
from tritium.data.types import SourceType, columns_of, flat
from tritium.errors import BadData, BadSetting
from tritium.hints import suggest

Kind = Literal["fixed", "bytes"]
Fill = float | int | str | None

_FLOATS = ("float16", "float32", "float64")
_DTYPES = frozenset(["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", *_FLOATS])
_ADVICE = {
    "map": "Take its keys apart in Spark: `col.getItem(key)` for known keys, or `map_keys` and `map_values`.",
    "array": "An array of numbers or of strings with a vocabulary can.",
    "struct": "An array of structs can be taken apart in Spark: `col.field` is an array of that field.",
}
DENSE_BYTES = 256 << 10  # of a sparse vector as a dense row, and no more: 65,536 float32
_INT64_DIGITS = 18  # an integer of so many digits fits into int64
_EXACT_DIGITS = 15  # a decimal of so many digits is exact in float64
_BY_COLUMN = ("vocabulary", "hash_buckets", "pad", "decode", "nulls")


@dataclass(frozen=True)
class Data:
    """A DataFrame, and how its columns become the columns of a batch.

    Every mapping is by the name of a batch column; `vocabulary`, `hash_buckets`, `pad`, `decode` and `nulls`
    also take the name of a source column. Raises BadSetting where one of these is no mapping.
    """

    frame: Any
    """A Spark DataFrame (classic or Connect), a pandas DataFrame or a pyarrow Table."""
    columns: Mapping[str, str | Sequence[str]] | Sequence[str] | None = None
    """Batch column → one source column, or several scalars packed to a row `[n]`. None: every column."""
    dtype: Mapping[str, str] | str | None = None
    """The numpy dtype per batch column, or one for all packed and floating ones; only so are digits lost."""
    default_dtype: Mapping[str, str] | str | None = None
    """The dtype where `dtype` asks for none: per batch column, or one for all floating ones. An integer that it does
    not hold exactly (float32 from 2**24 on) is BadRow; with `dtype` it is rounded."""
    vocabulary: Mapping[str, Sequence[str]] = setting(default_factory=dict)
    """String column → its known values; the batch has their index (int64). An unknown value is BadRow."""
    hash_buckets: Mapping[str, int] = setting(default_factory=dict)
    """String column → n; the batch has crc32(UTF-8) mod n (int64), the same on every machine."""
    pad: Mapping[str, int | tuple[int, float]] = setting(default_factory=dict)
    """Array of varying length → its fixed length, or (length, fill); fill is 0. A longer row is BadRow."""
    decode: Mapping[str, Callable[[bytes], np.ndarray[Any, Any]]] = setting(default_factory=dict)
    """Binary column → a function from its bytes to an array, called in the rank when a batch is made."""
    nulls: Mapping[str, float | int | str] = setting(default_factory=dict)
    """Column → the value in place of null, or "mask" (0, and a bool column `<name>_mask`: True = present)."""
    nan: Literal["error", "keep"] = "error"
    """Whether NaN and infinity in a floating column are BadRow or ordinary values."""
    shuffle: Literal["full", "stream"] | bool = "full"
    """What the exchange prepares: "full" and False sort the rows by id, "stream" does not."""
    row_key: Sequence[str] | str = ()
    """Columns that identify a row. Rows are sorted by them within their source partition before they get their ids, so
    that a row has the same id when Spark computes a join or an aggregation again: a resumed epoch is then exact."""

    def __post_init__(self) -> None:
        wrong = []
        for name in _BY_COLUMN:
            value = getattr(self, name)
            if not isinstance(value, Mapping):
                shown = getattr(value, "__name__", repr(value))
                wrong.append(f"{name}={shown} must be a mapping from columns: {name}={{'x': {shown}}}.")
        if wrong:
            raise BadSetting("tr.Data: " + " ".join(wrong), settings=wrong)

    @property
    def keys(self) -> tuple[str, ...]:
        """The columns of `row_key`."""
        return (self.row_key,) if isinstance(self.row_key, str) else tuple(self.row_key)


@dataclass(frozen=True, kw_only=True)
class Field:
    """One batch column: where it comes from, and what its rows look like."""

    name: str
    sources: tuple[str, ...]
    """Source columns. Several only when scalars are packed to one row."""
    kind: Kind
    dtype: str
    """The numpy dtype in the batch ("uint8" for bytes)."""
    shape: tuple[int, ...] | None
    """Of one row: () is a scalar, so the batch is `[b]`; None until the first row shows it."""
    depth: int = 0
    """How many arrays are around the values: 0 a scalar, 1 a vector or packed scalars, 2 a matrix."""
    packed: bool = False
    """True for scalars that travel as one array; position i of a row then comes from `sources[i]`."""
    travel: str = ""
    """The numpy dtype in which the values leave the JVM, "" for strings and bytes."""
    vocabulary: tuple[str, ...] | None = None
    buckets: int | None = None
    pad: tuple[int, float] | None = None
    nulls: tuple[Fill, ...] = (None,)
    """Per source: the fill value, "mask", or None (a null is BadRow)."""
    nan: Literal["error", "keep"] = "error"
    exact: tuple[bool, ...] = ()
    """Per source: whether it holds integers of which each must be exact in `dtype`; () for none."""
    marked: bool = False
    """Whether a row may be a mark, which says that what was there can't be packed: see `exchange.pack`."""

    @property
    def mask(self) -> bool:
        """True when a bool column `<name>_mask`, of the same shape, goes with this one."""
        return "mask" in self.nulls

    def to_json(self) -> dict[str, Any]:
        """A plain dict; tuples become lists when it is written."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Field:
        """The Field that `to_json` described."""
        facts: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in plain.items()}
        return cls(**facts)


def as_data(value: Any) -> Data:
    """`value` itself, or a bare frame as Data."""
    return value if isinstance(value, Data) else Data(value)


def plan(schema: Any, data: Data, name: str) -> tuple[Field, ...]:
    """The batch columns of `data`, from a pyspark StructType or a pyarrow Schema.

    Raises BadData that lists every problem of the frame at once. Nothing is read.
    """
    planner = _Planner(columns_of(schema), data)
    planner.check_doubles(schema.names)
    wanted = planner.wanted()
    fields = [planner.field(batch, sources, packed) for batch, (sources, packed) in wanted.items()]
    planner.check_settings(wanted)
    if planner.problems:
        count = len(planner.problems)
        listed = "".join(f"\n  - {problem}" for problem in planner.problems)
        raise BadData(
            f'data "{name}" can\'t be read, {count} problem{"s" * (count > 1)}:{listed}',
            name=name,
            problems=list(planner.problems),
        )
    return tuple(field for field in fields if field is not None)


def _fits(fill: float, dtype: str) -> bool:
    if dtype == "bool":
        return fill in (0, 1)
    limits = np.iinfo(dtype)
    return limits.min <= fill <= limits.max and int(fill) == fill


def may_be_beyond(kind: SourceType) -> bool:
    """Whether a scalar of this type may hold what int64 does not: a NaN, an infinity, a number that is too large."""
    return (kind.name == "number" and kind.dtype.startswith("float")) or (
        kind.name == "decimal" and kind.precision - kind.scale > _INT64_DIGITS
    )


def _must_be_exact(kind: SourceType, dtype: str) -> bool:
    """Whether a column of this type holds integers, of which some may not be exact in a floating `dtype`."""
    if dtype not in _FLOATS:
        return False
    if kind.name == "decimal":
        return kind.scale <= 0 and 10 ** (kind.precision - kind.scale) > narrow.largest_exact(np.dtype(dtype))
    return kind.name == "number" and not narrow.holds(np.dtype(dtype), np.dtype(kind.dtype))


class _Planner:
    """Turns columns and settings into Fields, and gathers every problem on the way."""

    def __init__(self, columns: Mapping[str, SourceType], data: Data) -> None:
        self.columns = dict(columns)
        self.data = data
        self.problems: list[str] = []

    def check_doubles(self, names: Sequence[str]) -> None:
        """Columns of one name, as a join leaves them, can't be told apart."""
        self.problems += [
            f"there are {count} columns called {name!r}. Rename or drop all but one."
            for name, count in Counter(names).items()
            if count > 1
        ]

    def wanted(self) -> dict[str, tuple[tuple[str, ...], bool]]:
        """Batch column → (source columns, packed?); structs flattened, unknown columns noted."""
        asked = self.data.columns
        if asked is None:
            asked = [name for name in self.columns if name.rpartition(".")[0] not in self.columns]
        if not isinstance(asked, Mapping):
            asked = {name: name for name in ([asked] if isinstance(asked, str) else asked)}
        found: dict[str, tuple[tuple[str, ...], bool]] = {}
        for batch, given in asked.items():
            names = (given,) if isinstance(given, str) else tuple(given)
            missing = [name for name in names if name not in self.columns]
            self.problems += [f"there is no column {name!r}.{suggest(name, self.columns)}" for name in missing]
            if not names:
                self.problems.append(f"batch column {batch!r} has no source column. Name at least one.")
            elif not missing and len(names) == 1 and self.columns[names[0]].name == "struct":
                for leaf in flat(self.columns, names[0]):
                    found[batch + leaf[len(names[0]) :]] = ((leaf,), False)
            elif not missing:
                alone = isinstance(given, str) or (len(names) == 1 and not self.columns[names[0]].scalar)
                found[batch] = (names, not alone)
        if not found and not self.problems:
            self.problems.append("it has no columns.")
        return found

    def field(self, batch: str, sources: tuple[str, ...], packed: bool) -> Field | None:
        """One Field, or None after its problems were noted."""
        before = len(self.problems)
        made = self._packed(batch, sources) if packed else self._single(batch, sources[0])
        return made if len(self.problems) == before else None

    def _packed(self, batch: str, sources: tuple[str, ...]) -> Field | None:
        kinds = [self.columns[source] for source in sources]
        for source, kind in zip(sources, kinds, strict=True):
            if not kind.scalar:
                self.problems.append(
                    f"column {source!r} of type {kind.text} can't be packed with others into {batch!r}: only "
                    f"numbers, decimals, dates and timestamps can. Give it a batch column of its own."
                )
        if not all(kind.scalar for kind in kinds):
            return None
        common = np.result_type(*(np.dtype(kind.dtype) for kind in kinds)).name
        asked = self._dtype(self.data.dtype, batch, floating=True)
        default = None if asked else self._dtype(self.data.default_dtype, batch, floating=common.startswith("float"))
        wide = [s for s, kind in zip(sources, kinds, strict=True) if kind.dtype in ("int64", "uint64")]
        if wide and common.startswith("float") and asked is None and default is None:
            self.problems.append(
                f"{batch!r} packs the 64-bit integers of {', '.join(map(repr, wide))} with floating columns, "
                f"and float64 holds integers exactly only up to 2**53. If that is meant, say so: "
                f"dtype={{{batch!r}: 'float64'}} (or 'float32')."
            )
        for source, kind in zip(sources, kinds, strict=True):
            self._check_decimal(source, kind, asked or default)
        dtype = asked or default or common
        exact = tuple(_must_be_exact(kind, dtype) for kind in kinds) if default else ()
        if dtype in _FLOATS:
            travel = "float32" if dtype == "float16" else dtype
            if self._keeps_infinity(kinds, dtype):
                travel = "float64"
        else:
            travel = "int64" if wide and common != "uint64" else common
        self._check_cast(batch, travel, dtype)
        if default and dtype in _FLOATS:
            self._check_times(batch, sources, kinds, dtype)
        nulls = tuple(self._null(batch, source, dtype) for source in sources)
        return Field(
            name=batch, sources=sources, kind="fixed", dtype=dtype, shape=(len(sources),), depth=1,
            packed=True, travel=travel, nulls=nulls, nan=self.data.nan, exact=exact if any(exact) else (),
            marked=travel == "int64" and any(may_be_beyond(kind) for kind in kinds),
        )  # fmt: skip

    def _single(self, batch: str, source: str) -> Field | None:
        kind = self.columns[source]
        leaf, depth = kind.leaf()
        if leaf.name == "string":
            return self._string(batch, source, depth)
        if leaf.name == "binary" and depth == 0:
            return self._binary(batch, source)
        if not leaf.scalar:
            advice = _ADVICE.get(leaf.text.partition("<")[0], "Convert it, or leave it out with `columns=`.")
            self.problems.append(f"column {source!r} has type {kind.text}, which can't be put in a batch. {advice}")
            return None
        floating = leaf.dtype.startswith("float")
        asked = self._dtype(self.data.dtype, batch, floating=floating)
        default = None if asked else self._dtype(self.data.default_dtype, batch, floating=floating)
        self._check_decimal(source, leaf, asked or default)
        dtype = asked or default or leaf.dtype
        travel = leaf.dtype
        if leaf.name == "decimal" or (depth and travel == "float64" and dtype in ("float16", "float32")):
            travel = {"float64": "float64", "float32": "float32", "float16": "float32"}.get(dtype, "float64")
            if leaf.name == "decimal" and dtype.startswith(("int", "uint")):
                travel = "int64"
            elif self._keeps_infinity([leaf], dtype):
                travel = "float64"
        self._check_cast(batch, travel, dtype)
        pad = self._pad(batch, source, kind, depth)
        shape = () if depth == 0 else (pad[0],) if pad else (kind.width,) if depth == 1 and kind.width else None
        return Field(
            name=batch, sources=(source,), kind="fixed", dtype=dtype, shape=shape, depth=depth, travel=travel,
            pad=pad, nulls=(self._null(batch, source, dtype),), nan=self.data.nan,
            exact=(True,) if default and _must_be_exact(leaf, dtype) else (), marked=kind.name == "vector",
        )  # fmt: skip

    def _string(self, batch: str, source: str, depth: int) -> Field | None:
        words = self._setting(self.data.vocabulary, batch, source)
        buckets = self._setting(self.data.hash_buckets, batch, source)
        here = f"column {source!r} is a string"
        if words is None and buckets is None:
            self.problems.append(
                f"{here}: give its values, vocabulary={{{batch!r}: [...]}}, or hash them, "
                f"hash_buckets={{{batch!r}: n}}, or leave it out with `columns=`."
            )
            return None
        if words is not None and buckets is not None:
            self.problems.append(f"{here} with both a vocabulary and hash_buckets. Choose one.")
            return None
        if words is not None:
            words = tuple(words)
            if not words or not all(isinstance(word, str) for word in words) or len(set(words)) < len(words):
                self.problems.append(
                    f"{here} whose vocabulary is empty, or holds a value twice, or one that is no string."
                )
        if buckets is not None and (not isinstance(buckets, int) or buckets < 1):
            self.problems.append(f"{here} with hash_buckets={buckets!r}. It must be a whole number of at least 1.")
        dtype = self._dtype(self.data.dtype, batch, floating=False) or "int64"
        pad = self._pad(batch, source, self.columns[source], depth)
        return Field(
            name=batch, sources=(source,), kind="fixed", dtype=dtype, depth=depth,
            shape=() if depth == 0 else (pad[0],) if pad else None,
            vocabulary=words, buckets=buckets, pad=pad, nulls=(self._null(batch, source, dtype, words),), nan="keep",
        )  # fmt: skip

    def _binary(self, batch: str, source: str) -> Field:
        if self._dtype(self.data.dtype, batch, floating=False) is not None:
            self.problems.append(
                f"column {source!r} is binary: decode={{{batch!r}: function}} decides its dtype, not `dtype`."
            )
        if self._setting(self.data.nulls, batch, source) is not None:
            self.problems.append(f"column {source!r} is binary, and a null in it can't be filled. Drop those rows.")
        return Field(name=batch, sources=(source,), kind="bytes", dtype="uint8", shape=None, nan="keep")

    def _dtype(self, given: Any, batch: str, *, floating: bool) -> str | None:
        """The dtype that `dtype` or `default_dtype` gives. One for all is not for columns that aren't `floating`."""
        asked = given
        if isinstance(asked, Mapping):
            asked = asked.get(batch)
        elif not floating:
            return None
        if asked is None:
            return None
        try:
            name: str = np.dtype(asked).name
        except TypeError:
            name = str(asked)
        if name not in _DTYPES:
            self.problems.append(
                f"dtype {asked!r} of batch column {batch!r} is unknown.{suggest(name, sorted(_DTYPES))}"
            )
            return None
        return name

    def _check_decimal(self, source: str, kind: SourceType, asked: str | None) -> None:
        if kind.name == "decimal" and kind.precision > _EXACT_DIGITS and asked is None:
            self.problems.append(
                f"column {source!r} is {kind.text}, and float64 holds only {_EXACT_DIGITS} digits exactly. "
                f"Ask for the rounding with `dtype` ('float64'), or cast the column."
            )

    def _keeps_infinity(self, kinds: Sequence[SourceType], dtype: str) -> bool:
        """Whether infinity is an ordinary value, which what Spark's own cast makes of 1e300 could not be told from."""
        narrowed = any(kind.name == "number" and kind.dtype == "float64" for kind in kinds)
        return self.data.nan == "keep" and narrowed and dtype in ("float16", "float32")

    def _check_times(self, batch: str, sources: Sequence[str], kinds: Sequence[SourceType], dtype: str) -> None:
        self.problems += [
            f"column {source!r} is a {kind.text}, microseconds since 1970, which {dtype} does not hold exactly. Take "
            f"numbers from it (F.hour, F.dayofweek, F.unix_timestamp in Spark, df[{source!r}].dt.hour in pandas), give "
            f"it a batch column of its own, or ask for dtype={{{batch!r}: 'float64'}}."
            for source, kind in zip(sources, kinds, strict=True)
            if kind.name == "timestamp" and not narrow.holds(np.dtype(dtype), np.dtype(kind.dtype))
        ]

    def _check_cast(self, batch: str, travel: str, dtype: str) -> None:
        if dtype == "bool" and travel != "bool":
            self.problems.append(
                f"batch column {batch!r} holds {travel}, not cast to bool. Compare it before: `col > 0`."
            )

    def _pad(self, batch: str, source: str, kind: SourceType, depth: int) -> tuple[int, float] | None:
        pad = self._setting(self.data.pad, batch, source)
        if pad is None:
            return None
        length, fill = pad if isinstance(pad, tuple | list) else (pad, 0)
        if depth != 1 or kind.name != "array":
            self.problems.append(f"pad for {source!r} of type {kind.text}: only arrays of one dimension are padded.")
        elif isinstance(length, bool) or not isinstance(length, int) or length < 1:
            self.problems.append(f"pad={pad!r} for {source!r}: the length must be a whole number of at least 1.")
        return length, fill

    def _null(self, batch: str, source: str, dtype: str, words: tuple[str, ...] | None = None) -> Fill:
        fill = self.data.nulls.get(source, self.data.nulls.get(batch))
        if isinstance(fill, str) and fill != "mask":
            if words is not None and fill not in words:
                self.problems.append(f"nulls={fill!r} for {source!r} is not in its vocabulary.{suggest(fill, words)}")
            elif words is None and self._setting(self.data.hash_buckets, batch, source) is None:
                self.problems.append(f"nulls={fill!r} for {source!r}: give a number, or 'mask'.")
        elif isinstance(fill, int | float) and np.dtype(dtype).kind in "iub" and not _fits(fill, dtype):
            self.problems.append(f"nulls={fill!r} for {source!r} does not fit its dtype {dtype}.")
        return fill

    def _setting(self, mapping: Mapping[str, Any], batch: str, source: str) -> Any:
        return mapping.get(batch, mapping.get(source))

    def check_settings(self, wanted: Mapping[str, tuple[tuple[str, ...], bool]]) -> None:
        """Settings for columns that are not there, values that don't exist, and names that clash."""
        data = self.data
        names = list(dict.fromkeys([*wanted, *(source for sources, _ in wanted.values() for source in sources)]))
        for setting_name in ("vocabulary", "hash_buckets", "pad", "decode", "nulls", "dtype", "default_dtype"):
            mapping = getattr(data, setting_name)
            for name in mapping if isinstance(mapping, Mapping) else ():
                if name not in names:
                    self.problems.append(f"{setting_name} names {name!r}, which is not read.{suggest(name, names)}")
        for batch, (sources, packed) in wanted.items():
            if self._setting(data.decode, batch, sources[0]) and (packed or self.columns[sources[0]].name != "binary"):
                self.problems.append(f"decode for {batch!r}: only binary columns are decoded.")
            masked = any(data.nulls.get(name) == "mask" for name in (batch, *sources))
            if masked and f"{batch}_mask" in wanted:
                self.problems.append(f"the mask of {batch!r} would be called {batch}_mask, as another column is.")
        for key in data.keys:
            if key not in self.columns:
                self.problems.append(f"row_key names {key!r}, which is not there.{suggest(key, list(self.columns))}")
        if data.nan not in ("error", "keep"):
            self.problems.append(f"nan={data.nan!r} is unknown. Use 'error' or 'keep'.")
        if data.shuffle not in ("full", "stream", True, False):
            self.problems.append(f"shuffle={data.shuffle!r} is unknown. Use 'full', 'stream' or False.")
