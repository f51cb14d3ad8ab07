"""The plan of a batch's columns, made from a schema and settings before anything is read (any process)."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from tritium.data import narrow
from tritium.data.decode import UNDECODED, content_of, decode_problems
from tritium.data.schema import BY_COLUMN, Content, Data, Field, Fill, by_column
from tritium.data.types import SourceType, columns_of, flat, may_exceed_int64
from tritium.errors import BadData
from tritium.hints import suggest

_FLOATS = ("float16", "float32", "float64")
_DTYPES = frozenset(["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", *_FLOATS])
_ADVICE = {
    "map": "Take its keys apart in Spark: `col.getItem(key)` for known keys, or `map_keys` and `map_values`.",
    "array": "An array of numbers or of strings with a vocabulary can.",
    "struct": "An array of structs can be taken apart in Spark: `col.field` is an array of that field.",
}
_EXACT_DIGITS = 15
"""A decimal of so many digits is exact in float64."""


def plan(schema: Any, data: Data, name: str) -> tuple[Field, ...]:
    """Return the batch columns of `data`. Nothing is read.

    schema : a pyspark StructType or a pyarrow Schema.
    name   : the name of the DataFrame, for messages.

    Raises BadData, which lists every problem of the frame at once.
    """
    fields, problems = draft(schema, data)
    if problems:
        count = len(problems)
        listed = "".join(f"\n  - {problem}" for problem in problems)
        raise BadData(
            f'data "{name}" can\'t be read, {count} problem{"s" * (count > 1)}:{listed}', name=name, problems=problems
        )
    return fields


def draft(schema: Any, data: Data) -> tuple[tuple[Field, ...], list[str]]:
    """Return the batch columns that can be read, and a sentence for each problem of the others and of the settings."""
    planner = _Planner(columns_of(schema), schema.names, data)
    planner.check_doubles()
    wanted = planner.wanted()
    fields = [planner.field(batch, sources, packed) for batch, (sources, packed) in wanted.items()]
    planner.check_settings(wanted)
    skip = data.on_error == "skip"
    planned = tuple(dataclasses.replace(field, skip=skip) for field in fields if field is not None)
    return planned, planner.problems


def _must_be_exact(kind: SourceType, dtype: str) -> bool:
    """Return whether a column of this type holds integers that may not be exact in a floating `dtype`."""
    if dtype not in _FLOATS:
        return False
    if kind.name == "decimal":
        return kind.scale <= 0 and 10 ** (kind.precision - kind.scale) > narrow.largest_exact(np.dtype(dtype))
    return kind.name == "number" and not narrow.holds(np.dtype(dtype), np.dtype(kind.dtype))


class _Planner:
    """A planner of Fields from source columns and settings, which collects every problem in `problems`."""

    def __init__(self, columns: Mapping[str, SourceType], names: Sequence[str], data: Data) -> None:
        """Take the columns by (dotted) name, and the frame's own `names` among them."""
        self.columns = dict(columns)
        self.names = names
        self.data = data
        self.read: frozenset[str] = frozenset()
        """The source columns that are read; known after `wanted`."""
        self.problems: list[str] = []

    def check_doubles(self) -> None:
        """Add a problem for columns of the same name, as a join leaves them, since the name is then ambiguous."""
        self.problems += [
            f"there are {count} columns called {name!r}. Rename or drop all but one."
            for name, count in Counter(self.names).items()
            if count > 1
        ]

    def wanted(self) -> dict[str, tuple[tuple[str, ...], bool]]:
        """Return batch column → (source columns, whether they are packed); structs are flattened."""
        asked = self.data.columns
        if asked is None:
            asked = list(dict.fromkeys(self.names))
        if not isinstance(asked, Mapping):
            asked = {name: name for name in ([asked] if isinstance(asked, str) else asked)}
        sources_of: dict[str, tuple[tuple[str, ...], bool]] = {}
        for batch, listed in asked.items():
            names = (listed,) if isinstance(listed, str) else tuple(listed)
            missing = [name for name in names if name not in self.columns]
            self.problems += [f"there is no column {name!r}.{suggest(name, self.columns)}" for name in missing]
            if not names:
                self.problems.append(f"batch column {batch!r} has no source column. Name at least one.")
            elif not missing and len(names) == 1 and self.columns[names[0]].name == "struct":
                for leaf in flat(self.columns, names[0]):
                    self._check_path(leaf)
                    sources_of[batch + leaf[len(names[0]) :]] = ((leaf,), False)
            elif not missing:
                whole = names[0] in self.data.decode or not self.columns[names[0]].scalar
                alone = isinstance(listed, str) or (len(names) == 1 and whole)
                sources_of[batch] = (names, not alone)
        if not sources_of and not self.problems:
            self.problems.append("it has no columns.")
        self.read = frozenset(source for sources, _ in sources_of.values() for source in sources)
        return sources_of

    def _check_path(self, leaf: str) -> None:
        """Add a problem for a struct's field that has the dotted name of a column, which is read in its place."""
        if leaf in self.names:
            self.problems.append(
                f"{leaf!r} is a column, and also a field of struct {leaf.rpartition('.')[0]!r}. Rename one of them, or "
                "leave the struct out with `columns=`."
            )

    def field(self, batch: str, sources: tuple[str, ...], packed: bool) -> Field | None:
        """Return one Field, or None where it has problems."""
        before = len(self.problems)
        planned = self._packed(batch, sources) if packed else self._single(batch, sources[0])
        planned = None if planned is None else self._normalized(planned)
        return planned if len(self.problems) == before else None

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
            if self._keeps_infinity(batch, kinds, dtype):
                travel = "float64"
        else:
            travel = "int64" if wide and common != "uint64" else common
        self._check_cast(batch, travel, dtype)
        if default and dtype in _FLOATS:
            self._check_times(batch, sources, kinds, dtype)
        nulls = tuple(self._null(batch, source, dtype) for source in sources)
        return Field(
            name=batch, sources=sources, kind="fixed", dtype=dtype, shape=(len(sources),), depth=1,
            packed=True, travel=travel, nulls=nulls, nan=self._nan(batch), exact=exact if any(exact) else (),
            asked=asked is not None,
            marked=travel == "int64" and any(may_exceed_int64(kind) for kind in kinds),
        )  # fmt: skip

    def _single(self, batch: str, source: str) -> Field | None:
        kind = self.columns[source]
        leaf, depth = kind.leaf()
        content = content_of(kind)
        if content in ("bytes", "image") or (content and self._setting(self.data.decode, batch, source) is not None):
            return self._decoded(batch, source, content)
        if leaf.name == "string":
            return self._string(batch, source, depth)
        if not leaf.scalar:
            advice = _ADVICE.get(leaf.text.partition("<")[0], "Convert it, or leave it out with `columns=`.")
            self.problems.append(f"column {source!r} has type {kind.text}, which can't be put in a batch. {advice}")
            return None
        floating = leaf.dtype.startswith("float")
        asked = self._dtype(self.data.dtype, batch, floating=floating)
        default = None if asked else self._dtype(self.data.default_dtype, batch, floating=floating)
        self._check_decimal(source, leaf, asked or default)
        dtype = asked or default or leaf.dtype
        self._check_digits(batch, source, leaf, dtype)
        travel = leaf.dtype
        if leaf.name == "decimal" or (depth and travel == "float64" and dtype in ("float16", "float32")):
            travel = {"float64": "float64", "float32": "float32", "float16": "float32"}.get(dtype, "float64")
            if leaf.name == "decimal" and dtype.startswith(("int", "uint")):
                travel = "int64"
            elif self._keeps_infinity(batch, [leaf], dtype):
                travel = "float64"
        self._check_cast(batch, travel, dtype)
        pad = self._pad(batch, source, kind, depth)
        shape = () if depth == 0 else (pad[0],) if pad else (kind.width,) if depth == 1 and kind.width else None
        return Field(
            name=batch, sources=(source,), kind="fixed", dtype=dtype, shape=shape, depth=depth, travel=travel,
            pad=pad, nulls=(self._null(batch, source, dtype),), nan=self._nan(batch),
            exact=(True,) if default and _must_be_exact(leaf, dtype) else (), marked=kind.name == "vector",
            asked=asked is not None,
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
        listed = isinstance(self.data.columns, Mapping) and not isinstance(self.data.columns[batch], str)
        one = (1,) if listed and dtype in _FLOATS else ()  # Of numbers, too, a list of columns is [batch, n].
        return Field(
            name=batch, sources=(source,), kind="fixed", dtype=dtype, depth=depth,
            shape=one if depth == 0 else (pad[0],) if pad else None,
            vocabulary=words, unknown=self.data.unknown_words == "keep", buckets=buckets, pad=pad,
            nulls=(self._null(batch, source, dtype, words),), nan="keep",
        )  # fmt: skip

    def _normalized(self, field: Field) -> Field:
        """Return the field with means and deviations, which its values need as float64: differences of large ones."""
        asked = [self._setting(self.data.normalize, field.name, source) for source in field.sources]
        if all(one is None for one in asked):
            return field
        name = next(source for source, one in zip(field.sources, asked, strict=True) if one is not None)
        here = f"normalize for {name!r}"
        coded = field.kind == "bytes" or field.vocabulary is not None or field.buckets is not None
        if coded or field.dtype not in _FLOATS or field.pad is not None:
            what = "is an index or decoded" if coded else "is padded" if field.pad else f"becomes {field.dtype}"
            self.problems.append(
                f"{here}: it {what}, and only floating numbers are normalised. Leave it out there; a number among "
                f"others is floating in a list: {field.name!r}: [{name!r}]."
            )
            return field
        wrong = (
            f"{here}: it must be (mean, standard deviation), two finite numbers or two sequences of one for each "
            "value of a row, the deviations above 0."
        )
        if not all(one is None or (isinstance(one, list | tuple) and len(one) == 2) for one in asked):
            self.problems.append(wrong)
            return field
        whole = asked[0] is not None and all(one is asked[0] for one in asked) and np.ndim(asked[0][0]) == 1
        if field.packed and not whole:
            mean, std = (
                tuple(default if one is None else one[i] for one in asked) for i, default in ((0, 0.0), (1, 1.0))
            )
        else:
            mean, std = (tuple(np.ravel(part).tolist()) for part in asked[0])
        shape = (len(mean),) if field.depth == 1 and field.shape is None and len(mean) > 1 else field.shape
        numbers = all(isinstance(one, int | float) and math.isfinite(one) for one in (*mean, *std))
        fit = shape is None or len(mean) in (1, math.prod(shape))
        if not mean or not numbers or not fit or len(mean) != len(std) or min(std) <= 0:
            self.problems.append(wrong)
            return field
        kept = not field.packed and self.columns[field.sources[0]].leaf()[0].name in ("date", "timestamp")
        travel = field.travel if kept else "float64"
        return dataclasses.replace(field, mean=mean, std=std, travel=travel, exact=(), shape=shape)

    def _decoded(self, batch: str, source: str, content: Content) -> Field:
        names = ("decode", "nulls", "vocabulary", "hash_buckets")
        settings = {name: self._setting(getattr(self.data, name), batch, source) for name in names}
        settings["dtype"] = self._dtype(self.data.dtype, batch, floating=False)
        self.problems += decode_problems(settings, batch, source, self.columns[source])
        return Field(
            name=batch, sources=(source,), kind="bytes", dtype="uint8", shape=None, nan="keep", content=content
        )

    def _dtype(self, asked: Any, batch: str, *, floating: bool) -> str | None:
        """Return the dtype for a batch column.

        asked    : the setting `dtype` or `default_dtype`.
        floating : whether the column is floating; a dtype for all is for these only.
        """
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

    def _check_digits(self, batch: str, source: str, kind: SourceType, dtype: str) -> None:
        """Add a problem for a decimal read as integers that may exceed int64, beyond which Spark's cast wraps.

        Without ANSI the cast is silent; in a packed row the JVM marks such a value (`exchange.pack`).
        """
        if kind.name == "decimal" and dtype.startswith(("int", "uint")) and may_exceed_int64(kind):
            self.problems.append(
                f"column {source!r} is {kind.text}, and may hold numbers beyond int64, in which it would be read as "
                f"{dtype}. Cast it: F.col({source!r}).try_cast('bigint') in Spark gives null for those; or read it as "
                f"floating numbers: dtype={{{batch!r}: 'float64'}}."
            )

    def _nan(self, batch: str) -> Literal["error", "keep"]:
        nan = self.data.nan
        return nan if isinstance(nan, str) else nan.get(batch, "error")

    def _keeps_infinity(self, batch: str, kinds: Sequence[SourceType], dtype: str) -> bool:
        """Return whether infinity is an ordinary value, with which Spark's cast of 1e300 would be confused."""
        narrowed = any(kind.name == "number" and kind.dtype == "float64" for kind in kinds)
        return self._nan(batch) == "keep" and narrowed and dtype in ("float16", "float32")

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
        fill = self._fill(batch, source)
        if isinstance(fill, str) and fill != "mask":
            if words is not None and fill not in words and self.data.unknown_words == "error":
                self.problems.append(f"nulls={fill!r} for {source!r} is not in its vocabulary.{suggest(fill, words)}")
            elif words is None and self._setting(self.data.hash_buckets, batch, source) is None:
                self.problems.append(f"nulls={fill!r} for {source!r}: give a number, or 'mask'.")
        elif isinstance(fill, int | float) and np.dtype(dtype).kind in "iub" and not narrow.fits(fill, dtype):
            self.problems.append(f"nulls={fill!r} for {source!r} does not fit its dtype {dtype}.")
        return fill

    def _fill(self, batch: str, source: str) -> Fill:
        """Return the value of `nulls`. That of a packed source takes precedence over that of its row."""
        nulls = self.data.nulls
        fill = nulls[source] if source in nulls else by_column(nulls, batch, source, self.read)
        fill = fill.item() if isinstance(fill, np.generic) else fill
        return int(fill) if isinstance(fill, bool) else fill  # A model keeps it as a number of JSON.

    def _setting(self, mapping: Mapping[str, Any], batch: str, source: str) -> Any:
        return by_column(mapping, batch, source, self.read)

    def _check_where(self) -> None:
        if self.data.where is None:
            return
        name, _ = self.data.where
        if name not in self.columns:
            self.problems.append(f"where names {name!r}, which is not there.{suggest(name, list(self.columns))}")
        elif self.columns[name].dtype != "bool":
            self.problems.append(f"where names {name!r} of type {self.columns[name].text}; it must be boolean.")

    def check_settings(self, wanted: Mapping[str, tuple[tuple[str, ...], bool]]) -> None:
        """Add problems for settings of missing columns, unknown values, and names that clash."""
        data = self.data
        names = list(dict.fromkeys([*wanted, *(source for sources, _ in wanted.values() for source in sources)]))
        for setting_name in (*BY_COLUMN, "dtype", "default_dtype", "nan"):
            mapping = getattr(data, setting_name)
            for name in mapping if isinstance(mapping, Mapping) else ():
                if name not in names:
                    self.problems.append(f"{setting_name} names {name!r}, which is not read.{suggest(name, names)}")
        for batch, (sources, packed) in wanted.items():
            known = not packed and content_of(self.columns[sources[0]])
            if not known and any(self._setting(data.decode, batch, source) is not None for source in sources):
                self.problems.append(f"decode for {batch!r}: {UNDECODED}")
            masked = any(self._fill(batch, source) == "mask" for source in sources)
            if masked and f"{batch}_mask" in wanted:
                self.problems.append(f"the mask of {batch!r} would be called {batch}_mask, as another column is.")
        for key in (key for key in data.keys if key not in self.columns):
            self.problems.append(f"row_key names {key!r}, which is not there.{suggest(key, list(self.columns))}")
        self.problems += _together_problems(data.together, self.columns, self.read, data.nulls)
        self._check_where()
        nan = list(data.nan.values()) if isinstance(data.nan, Mapping) else [data.nan]
        for setting_name, values in (("nan", nan), ("unknown_words", [data.unknown_words])):
            self.problems += [
                f"{setting_name}={value!r} is unknown. Use 'error' or 'keep'."
                for value in values
                if value not in ("error", "keep")
            ]
        if data.on_error not in ("fail", "skip"):
            self.problems.append(f"on_error={data.on_error!r} is unknown. Use 'fail' or 'skip'.")
        if data.shuffle not in ("full", "stream", True, False):
            self.problems.append(f"shuffle={data.shuffle!r} is unknown. Use 'full', 'stream' or False.")


def _together_problems(
    name: str | None, columns: Mapping[str, SourceType], read: Collection[str], filled: Collection[str]
) -> list[str]:
    """Return the errors of `together=name` for a frame of these columns.

    read   : the columns that are read.
    filled : the names for which `nulls` has a value.
    """
    problem = None if name is None else unfit_together(name, columns)
    if problem is None and name is not None and name not in read:  # A null in it would not be seen.
        problem = f"{name!r}, which is not read. Add it to `columns=`."
    if name in filled:
        problem = f"{name!r}, whose nulls are filled: they could not go with the rows of that value. "
        problem += f"Fill them before: df.fillna({{{name!r}: 0}})."
    return [f"together names {problem}"] if problem else []


def unfit_together(name: str, columns: Mapping[str, SourceType]) -> str | None:
    """Return the reason why equal values of this column can't keep rows together, after "… names", or None."""
    if name not in columns:
        return f"{name!r}, which is not there.{suggest(name, list(columns))}"
    kind = columns[name]
    if kind.item is not None or kind.name in ("struct", "other") or kind.dtype.startswith("float"):
        return f"{name!r} of type {kind.text}, and takes integers, strings, dates and timestamps. Cast the column."
    return None
