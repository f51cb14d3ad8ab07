"""Finds and checks the columns of a frame that become features, label and weight (driver)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tritium.data.plan import plan
from tritium.data.schema import Data, Field
from tritium.data.tables import table_of
from tritium.data.types import SourceType, columns_of, is_spark, path_of, spark_column
from tritium.errors import BadData, BadSetting
from tritium.hints import suggest
from tritium.ml.settings import LABEL, WEIGHT, Settings
from tritium.model.signature import Task


@dataclass(frozen=True)
class Columns:
    """Source columns and dtype by batch column; `class_label` is a floating column that holds class indices."""

    sources: dict[str, str | list[str]]
    dtypes: dict[str, str]
    class_label: str | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    """Settings of Data for nulls, words, bytes, NaN and short arrays."""

    def data(self, frame: Any, settings: Settings) -> Data:
        """Return the Data that reads `frame`."""
        if self.class_label is not None:
            frame = whole_numbers(frame, self.class_label, settings)
        frame = with_numbered_groups(frame, settings.together)
        keys = settings.row_key or ()
        order: dict[str, Any] = {"shuffle": settings.exchange_order, "row_key": keys}
        return Data(frame, columns=self.sources, default_dtype=self.dtypes, **order, **self.values)

    def fields(self, frame: Any, name: str) -> tuple[Field, ...]:
        """Return the planned batch columns. Raises BadData for what can't be read."""
        frame = with_numbered_groups(frame, self.values.get("together"))
        data = Data(frame, columns=self.sources, default_dtype=self.dtypes, **self.values)
        planned = plan(schema_of(frame), data, name)
        return tuple(dataclasses.replace(one, slots=slots(frame, one)) if one.marked else one for one in planned)


def as_frame(frame: Any, name: str, nulls: Mapping[str, Any] | None = None) -> Any:
    """Return a Spark DataFrame as it is, a table as an Arrow table. Raises BadSetting for a Data, else BadData.

    nulls : column → what fills its nulls. In these columns of a pandas DataFrame NaN is null.
    """
    if isinstance(frame, Data):
        what = "fit takes the DataFrame itself, and no tr.Data" if name == "train" else f"{name} is a tr.Data"
        raise BadSetting(
            f"{what}. Give the DataFrame, and say what becomes of nulls, NaN and short arrays with the estimator's own "
            "settings nulls=, nan= and pad=."
        )
    return frame if is_spark(frame) else table_of(frame, name, nulls or ())


def schema_of(frame: Any) -> Any:
    """Return a pyspark StructType or a pyarrow Schema."""
    return frame.schema


def find_columns(frame: Any, settings: Settings) -> Columns:
    """Return what is read of `frame`. Raises BadData with every column that is missing or of an unfit type."""
    known = columns_of(schema_of(frame))
    labels = settings.labels()
    features = [name for source in settings.inputs().values() for name in names_in(source)]
    weight = [settings.weight_col] if settings.weight_col is not None else []
    more = settings.more_sources()
    problems = []
    roles = [("feature", features), ("label", labels), ("weight", weight)]
    for role, names in roles + [(role, names_in(source)) for role, source, _ in more.values()]:
        for name in names:
            if name not in known:
                problems.append(f"{role} column {name!r} is missing.{suggest(name, known)}")
            elif problem := _unfit(name, known[name], role, settings):
                problems.append(f"{role} column {name!r} is {problem}")
    if problems:
        listed = "".join(f"\n  - {problem}" for problem in problems)
        raise BadData(f"This frame can't be trained on:{listed}", problems=problems)
    sources: dict[str, str | list[str]] = dict(settings.inputs())
    dtypes = {name: settings.dtype_of_features or _dtype(source, known) for name, source in sources.items()}
    scored: dict[str, str] = {}
    for name, source in settings.label_sources().items():
        sources[name], dtypes[name] = _label(name, names_in(source), known, settings)
        if settings.is_of_one_score(name) and names_in(source)[0] in settings.words():
            scored[name] = "float32"  # A word's index is int64, and such a loss takes numbers [batch, 1].
    if settings.weight_col is not None:
        sources[WEIGHT], dtypes[WEIGHT] = settings.weight_col, "float32"
    for name, (_, source, dtype) in more.items():
        sources[name], dtypes[name] = source, dtype
    values: dict[str, Any] = {
        **{name: dict(getattr(settings, name) or {}) for name in ("nulls", "pad", "hash_buckets", "decode")},
        "vocabulary": {column: () if isinstance(w, str | int) else w for column, w in settings.words().items()},
        "dtype": scored or None,
        "normalize": settings.normalize if isinstance(settings.normalize, Mapping) else {},
        "unknown_words": settings.unknown_words,
        "decode_threads": settings.decode_threads,
        "nan": settings.nan_by_column(),
        "together": settings.together,
        "on_error": "skip" if settings.on_error == "skip" else "fail",
    }
    return Columns(sources, dtypes, values=values)


def _label(
    name: str, names: list[str], known: dict[str, SourceType], settings: Settings
) -> tuple[str | list[str], str]:
    """Return what a label is read from, and its dtype: numbers `[batch, n]`, or one column as it is."""
    one = known[names[0]] if len(names) == 1 else None
    if one is not None and names[0] in (settings.decode or {}):
        return names[0], "float32"  # The dtype of the arrays is not known yet.
    if one is not None and names[0] in settings.words() and settings.is_of_one_score(name):
        return names, "float32"
    if one is None or _floating(one) or (one.scalar and settings.is_of_one_score(name)):
        return names, _dtype(names, known)
    if one.scalar and one.dtype == "bool":
        return names[0], "int64"
    return names[0], _dtype(names[0], known)


def refuse_other_types(columns: Columns, frame: Any, validation: Any, settings: Settings) -> None:
    """Raise BadData for columns of the validation rows that would be read otherwise than those of the training.

    Values are read in the dtypes of the training. Other floats and other integers do no harm there, but a fraction
    would be cut to an integer, and a date become a number of days. Raises what `find_columns` does, too.
    """
    find_columns(validation, settings)
    known, others = columns_of(schema_of(frame)), columns_of(schema_of(validation))
    problems = []
    for batch, source in columns.sources.items():
        # A label of classes is checked value by value.
        as_integers = columns.dtypes[batch] == "int64" and names_in(source) != [columns.class_label]
        for name in names_in(source):
            (one, depth), (other, other_depth) = known[name].leaf(), others[name].leaf()
            cut = as_integers and other.dtype.startswith("float")
            if cut or depth != other_depth or (one.name == "date") != (other.name == "date"):
                problems.append(
                    f"column {name!r} is {others[name].text} in the validation DataFrame, and {known[name].text} in "
                    "the one to train on. Cast one of them to the type of the other."
                )
    if problems:
        listed = "".join(f"\n  - {problem}" for problem in problems)
        raise BadData(f"The validation DataFrame can't be read as the one to train on:{listed}", problems=problems)


def task_of(settings: Settings, frame: Any, scores: tuple[int, ...] | None) -> tuple[Task | None, str | None]:
    """Return the task of the predictions, and a line for the user where it is a guess.

    `scores` is the shape of a row of the module's output; None when that is not known yet.
    """
    if settings.task != "auto":
        return settings.task, None
    labels = settings.labels()
    if not labels:
        return None, None
    if labels[0] in (settings.decode or {}):
        return "regression", None
    kind = columns_of(schema_of(frame))[labels[0]]
    several = scores is None or (len(scores) == 1 and scores[0] > 1)
    if labels[0] in settings.words():
        if len(labels) == 1 and (settings.is_of_one_score() or (several and settings.is_by_class())):
            return "classification", None
        return None, (
            f"predictions will be what the model returns. If that are scores or probabilities of the words of label "
            f'column {labels[0]!r}, say task="classification"'
        )
    if len(labels) == 1 and kind.scalar and settings.is_of_one_score():
        return "classification", None
    if len(labels) > 1 or not kind.scalar or not several or settings.has_own_step():
        return "regression", None
    if settings.is_by_class():
        return "classification", None
    if scores is not None and kind.name == "number" and not kind.dtype.startswith("float"):
        return "regression", (
            f"predictions will be the module's {scores[0]} outputs as an array. If they are scores of classes, as the "
            f'integers of label column {labels[0]!r} suggest, say task="classification"'
        )
    return "regression", None


def maybe_classes(columns: Columns, frame: Any, settings: Settings, scores: tuple[int, ...] | None) -> Columns:
    """Return `found` with class indices as label for a classification with one floating label and a score per class.

    Otherwise as it is. `scores` is the shape of a row of the module's output; None when that is not known yet.
    """
    labels = settings.labels()
    if settings.task != "classification" or len(labels) != 1 or settings.has_own_step():
        return columns
    if not _floating(columns_of(schema_of(frame))[labels[0]]):
        return columns
    one_score = settings.is_of_one_score() if scores is None else scores in ((), (1,))
    if one_score:
        return columns
    sources, dtypes = {**columns.sources, LABEL: labels[0]}, {**columns.dtypes, LABEL: "int64"}
    return dataclasses.replace(columns, sources=sources, dtypes=dtypes, class_label=labels[0])


def whole_numbers(frame: Any, column: str, settings: Settings) -> Any:
    """Return the frame with this floating column as int64; a fraction or a NaN in it is an error, not rounded.

    Raises BadData for a table. On Spark the JVM checks the column as it is read, and the job fails with the same text.
    With on_error="skip" it becomes a null, for which its row is left out.
    """
    skip = settings.on_error == "skip"
    what = f"label column {column!r} must hold class indices, and holds "
    advice = (
        f". Drop rows without a label (df.dropna(subset=[{column!r}])), number the classes 0, 1, 2, …; for a number to "
        f"predict take a loss of numbers, such as {settings.loss_of_numbers}."
    )
    if not is_spark(frame):
        value = frame[column]
        whole = pc.and_(pc.equal(value, pc.floor(value)), pc.less(pc.abs(value), 2.0**63))  # A null stays one.
        wrong = value.filter(pc.invert(whole))
        if len(wrong) and skip:
            value = pc.if_else(whole, value, None)
        elif len(wrong):
            raise BadData(f"{what}{wrong[0].as_py()!r}{advice}", column=column, value=wrong[0].as_py())
        position = frame.schema.get_field_index(column)
        return frame.set_column(position, column, value.cast(pa.int64()))
    from pyspark.sql import functions as F

    value = spark_column(frame.schema, column)
    message = F.concat(F.lit(what), value.cast("string"), F.lit(advice))
    whole = value.isNull() | (value == F.floor(value))
    other = F.lit(None).cast("long") if skip else F.raise_error(message).cast("long")
    return frame.withColumn(column, F.when(whole, value.cast("long")).otherwise(other))


def with_numbered_groups(frame: Any, column: str | None) -> Any:
    """Return the frame with numbers in place of the words in this column of groups; otherwise as it is.

    On Spark a number is a hash of 64 bits, which two of a million words share once in 37 million frames.
    """
    if column is None or columns_of(schema_of(frame))[column].name != "string":
        return frame
    if is_spark(frame):
        from pyspark.sql import functions as F

        word = spark_column(frame.schema, column)
        # The hash of a null is a number, which a null is not to become.
        return frame.withColumn(column, F.when(word.isNotNull(), F.xxhash64(word)))
    words = pa.chunked_array([table_column(frame, column).combine_chunks()])
    words = words if pa.types.is_dictionary(words.type) else words.dictionary_encode()
    numbers = pa.chunked_array([chunk.indices.cast(pa.int64()) for chunk in words.chunks], pa.int64())
    position = frame.schema.get_field_index(column)
    return frame.append_column(column, numbers) if position < 0 else frame.set_column(position, column, numbers)


def table_column(table: pa.Table, name: str) -> Any:
    """Return the values of a column of an Arrow table, also of a nested one: `address.zip`."""
    if name in table.schema.names:
        return table[name]
    top, *below = path_of(table.schema, name)
    return pc.struct_field(table[top], below)


def slots(frame: Any, field: Field) -> tuple[str, ...]:
    """Return the names of the numbers of a vector column by its metadata; () where not each has one."""
    if not is_spark(frame):
        return ()
    of_column: list[dict[str, Any]] = [f.metadata for f in frame.schema.fields if f.name == field.sources[0]]
    metadata = of_column[0].get("ml_attr", {}) if of_column else {}
    every = [one for kind in metadata.get("attrs", {}).values() for one in kind]
    names = {int(one["idx"]): str(one["name"]) for one in every if "idx" in one and "name" in one}
    count = metadata.get("num_attrs", len(names))
    return tuple(names[i] for i in range(count)) if names.keys() == set(range(count)) else ()


def names_in(source: str | Sequence[str]) -> list[str]:
    """Return the names of one or several columns as a list."""
    return [source] if isinstance(source, str) else list(source)


def _floating(kind: SourceType) -> bool:
    return kind.scalar and kind.dtype in ("float32", "float64")


def _dtype(source: str | Sequence[str], known: dict[str, SourceType]) -> str:
    """Return "float32" for packed scalars and floats, "int64" for one integer column or an array of integers."""
    if not isinstance(source, str) and (len(source) > 1 or known[source[0]].scalar):
        return "float32"
    leaf, _ = known[names_in(source)[0]].leaf()
    return "int64" if leaf.dtype.lstrip("u").startswith("int") else "float32"


def _unfit(name: str, kind: SourceType, role: str, settings: Settings) -> str | None:
    """Return what is wrong with a column of this name and type in this role, with advice, or None."""
    leaf, depth = kind.leaf()
    decoded = name in (settings.decode or {})
    coded = decoded or name in settings.words() or name in (settings.hash_buckets or {})
    if leaf.name == "string" and not coded and not (role == "group" and not depth):
        if role == "label":
            return (
                f"a string. Learn its words as classes, vocabulary=[{name!r}], or number them: StringIndexer in Spark, "
                f"df[{name!r}].astype('category').cat.codes in pandas."
            )
        if settings.one_input:
            return (
                f"a string. Its words become categories: learn them, vocabulary=[{name!r}], or hash them, "
                f"hash_buckets={{{name!r}: 1000}}. Or number them yourself, as StringIndexer does, and name the column "
                f"of numbers in categorical_features."
            )
        return (
            f"a string. The model gets the index of a word: learn the words, vocabulary=[{name!r}], or hash them, "
            f"hash_buckets={{{name!r}: 1000}}, and give the column a name of its own beside those of numbers: "
            f"feature_cols={{'x': […], {name!r}: {name!r}}}. A path, say, is decoded: "
            f"decode={{{name!r}: function}}.{settings.words_in_model}"
        )
    if role == "label" and leaf.name == "string" and name in settings.words():
        return _unfit_words(name, settings)
    if leaf.name == "image" and settings.one_input:
        return "an image. Make numbers of it, by a UDF in Spark, say, as an array or a vector."
    if leaf.name == "timestamp":
        spark, pandas = "F.hour, F.dayofweek, F.unix_timestamp in Spark", f"df[{name!r}].dt.hour in pandas"
        return f"a {kind.text}. Take numbers from it: {spark}, {pandas}."
    is_told = leaf.name == "string" or (leaf.name == "number" and leaf.dtype.lstrip("u").startswith("int"))
    if role == "group" and (depth or not is_told):
        cast = "cast it to long in Spark, to int64 in pandas"
        return f"{kind.text}; a group is told by one integer or word a row: {cast}, or hash it (F.xxhash64)."
    if leaf.name == "binary" and not decoded:
        return f"binary. Give a function from its bytes to an array: decode={{{name!r}: function}}."
    packed = [name for source in settings.inputs().values() if len(names_in(source)) > 1 for name in names_in(source)]
    if depth and role == "feature" and settings.one_input and name in packed:
        return f"{kind.text}, which can't stand beside other columns of numbers. Put all into one, by VectorAssembler."
    if depth and (role in ("weight", "init_score") or (role == "label" and settings.one_input)):
        return f"{kind.text}; {'an' if role == 'init_score' else 'a'} {role} is one number a row."
    return None


def _unfit_words(name: str, settings: Settings) -> str | None:
    """Return why the words of this label can't be trained on, with advice, or None."""
    words = settings.words()[name]
    if settings.task == "regression" and isinstance(words, str | int):
        return (
            "a string, whose words are learnt in the order of their frequency: no numbers to predict. Give the words "
            f'in their order, vocabulary={{{name!r}: ["low", "high"]}}, or train a classification.'
        )
    of_one_score = settings.task != "regression" and any(
        settings.is_of_one_score(label)
        for label, source in settings.label_sources().items()
        if name in names_in(source)
    )
    if of_one_score and not isinstance(words, str | int) and len(words) > 2:
        return (
            f"a string of {len(words)} words ({', '.join(map(repr, words[:3]))}, …), and the loss compares one score "
            "with 0 or 1. Take a loss of a score for each class, and let the last layer give one for every word."
        )
    return None
