"""`score`: a model's predictions as columns of a DataFrame, a batch or a stream (driver)."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import pyarrow as pa

from tritium import ship
from tritium.data.exchange import pack, takes_bytes
from tritium.data.schema import Field
from tritium.data.types import spark_column
from tritium.errors import BadSetting
from tritium.events import MicroBatchScored, stamped
from tritium.model.bad_rows import OnError, check_on_error
from tritium.model.calls import BatchSize, Computing, check_batch_size
from tritium.model.engine import Parts, Weights
from tritium.model.model import Model
from tritium.model.signature import Signature
from tritium.model.table import fields, mismatch
from tritium.observe.stream import Callback, listeners
from tritium.predict import weights
from tritium.predict.following import Followed, Following
from tritium.predict.worker import result_type, with_errors
from tritium.spark import is_connect
from tritium.spark.inside import jvm_bytes, older
from tritium.spark.inside.as_rows import as_rows
from tritium.spark.inside.jvm_bytes import as_bytes_or_array
from tritium.spark.python import drivers_python

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from tritium.predict.query_run import QueryRun

_UNROLLED_CLASSES = 16  # Up to here each class has its own expression, which Spark compiles; it interprets a lambda.
VERSION = "model_version"
"""The column that a model which is followed adds: the number of the version that scored the row."""
_sent: WeakKeyDictionary[Model, tuple[Any, str, Any]] = WeakKeyDictionary()


def score(
    model: Model,
    df: DataFrame,
    *,
    output_cols: Sequence[str] | None = None,
    class_cols: ClassColumns | None = None,
    batch_size: BatchSize = 1024,
    device: str = "cpu",
    on_error: OnError = "fail",
    error_col: str = "prediction_error",
    computes: Computing | None = None,
    followed: Followed | None = None,
    metrics: str = "",
    run_dir: str = "",
) -> DataFrame:
    """Return `df` with the model's predictions. Only the packed inputs leave the JVM; nothing runs yet.

    output_cols    : names of the new columns: one for each output ("prediction" and "probability" for a
                     classification), or a single one: a struct of several outputs, the class alone for a
                     classification.
    class_cols     : the further columns of a classification; None: there are none.
    batch_size     : rows that the module is called with at once, or "auto": each worker finds the size.
    on_error       : for a row that the model can't take, or for which it raises: "fail" fails the job, "skip" leaves it
                     out, "null" gives it nulls as predictions, "column" also the reason in the column `error_col`,
                     which is null for all other rows.
    computes       : how numbers are computed; None: as the model does by itself.
    followed       : of which versions the newest scores, in a stream as long as it runs; None: `model` itself.
    metrics        : the name under which Spark observes rows and the model's time; "": it does not.
    run_dir        : of a stream, a local directory for what happens in its queries; "": none is written.

    Raises SignatureMismatch with every difference between the columns and the inputs of the model.
    """
    from pyspark.sql import functions as F

    check_batch_size(batch_size)
    check_on_error(on_error)
    computes = computes or Computing()
    model.engine.check_device(device)
    model.engine.check_computing(computes)
    names = output_names(model.signature, output_cols)
    more = (class_cols or ClassColumns()).of(model.signature, df.columns)
    errors = [error_col] if on_error == "column" else []
    refuse_taken([*names, *more.values(), *errors, *([VERSION] if followed else [])], df.columns)
    from tritium.spark.inside.hangs import refuse_hanging

    refuse_hanging(df)
    schema = df.schema
    callbacks, run = listeners(), None
    if run_dir and df.isStreaming:
        run = _query_run(run_dir, metrics, model.signature)
        metrics, callbacks = run.metrics, (*callbacks, run.event)
    following = Following(followed, df.sparkSession, callbacks) if followed and df.isStreaming else None
    if following is not None:
        number, model = following.first
    elif followed is not None:
        number, model = followed.newest() or (0, model)
    planned = fields(model.signature, schema)
    plan, sent = _parts(model, df.sparkSession, df.isStreaming)
    inputs = [planned[i.name] for i in model.signature.inputs]
    arrays = [takes_bytes(one) for one in inputs]
    plan["as_bytes"] = (
        arrays if any(arrays) and jvm_bytes.used.why_not(df.sparkSession) is None else [False] * len(inputs)
    )
    plan |= {"batch_size": batch_size, "device": device, "on_error": on_error, "computes": computes}
    plan |= _reading(model, inputs)
    columns: list[Column] = []
    for one, as_bytes in zip(inputs, plan["as_bytes"], strict=True):
        packed = pack(one, schema)
        columns.extend(as_bytes_or_array(df.sparkSession, packed) if as_bytes else [packed])
    first = spark_column(schema, next((one for one in inputs if one.depth), inputs[0]).sources[0])
    df, kind, extra = as_rows(df, first), result_type(model.signature), None
    kind = with_errors(kind) if errors else kind
    with drivers_python(df.sparkSession):
        if following is None and not metrics:
            predicted = _predicted(df, "tritium.predict.worker:score", kind, columns, pickle.dumps(plan), sent)
        else:
            df, extra = _with_facts(df, following, metrics, kind, columns, plan, sent)
            if metrics and df.isStreaming and callbacks:
                _report(df.sparkSession, metrics, callbacks, run, extra)
            predicted = F.col(extra).getField("result")
    if following is not None:
        following.start(partial(_later, plan, inputs, schema))
    scored = _with_columns(df, model.signature, predicted, names, more, on_error, errors)
    if followed is not None:
        version = F.lit(number).cast("long") if following is None else F.col(str(extra)).getField("version")
        scored = scored.withColumn(VERSION, version)
    return scored if extra is None else scored.drop(extra)


def _reading(model: Model, inputs: Sequence[Field]) -> dict[str, Any]:
    """Return the parts of a plan that say how the columns become the model's inputs."""
    return {
        "fields": json.dumps([one.to_json() for one in inputs]),
        "decode": ship.pickle(model.decode) if model.decode else None,
        "transform": None if model.input_transform is None else ship.pickle(model.input_transform),
    }


def _later(plan: dict[str, Any], inputs: Sequence[Field], schema: Any, model: Model) -> tuple[dict[str, Any], Weights]:
    """Return the plan of a later version of a stream's model, and its weights.

    Raises SignatureMismatch where it needs the columns in another form than that in which they leave the JVM.
    """
    planned = fields(model.signature, schema)
    later = [planned[i.name] for i in model.signature.inputs]
    if differences := [
        f"input {new.name!r} is {new.described(_travels(new))}, and the query was started with {_travels(old)}."
        for old, new in zip(inputs, later, strict=True)
        if _travels(old) != _travels(new)
    ]:
        raise mismatch(differences)
    parts = model.engine.save(by_value=True)
    return {**plan, **_plan(model, parts, _weights_name(model, parts)), **_reading(model, later)}, parts.weights


def _travels(field: Field) -> str:
    """Return the form in which a field leaves the JVM."""
    form = (field.kind, field.content, field.travel, field.depth, field.packed, field.marked)
    return " ".join(map(str, form))


def _with_facts(
    df: DataFrame,
    following: Following | None,
    metrics: str,
    kind: pa.DataType,
    columns: Sequence[Column],
    plan: dict[str, Any],
    sent: Any,
) -> tuple[DataFrame, str]:
    """Return `df` with a column of structs of the result and the facts about it, observed, and the column's name."""
    from pyspark.sql import functions as F

    facts = {"plan": pickle.dumps(plan), "timed": bool(metrics), "following": following and following.facts()}
    parts = [("result", kind)]
    if following is not None:
        # In a stream this is the time at which the micro-batch began: the same in all tasks, and in its offset log.
        columns = [*columns, F.unix_micros(F.current_timestamp())]
        parts.append(("version", pa.int64()))
    if metrics:
        parts += [("milliseconds", pa.float64()), ("beside", pa.int64())]
    name = f"_tritium_{uuid.uuid4().hex}"
    target = "tritium.predict.followed:score"
    df = df.withColumn(name, _predicted(df, target, pa.struct(parts), columns, pickle.dumps(facts), sent))
    if metrics:
        took, beside = (F.col(name).getField(field) for field in ("milliseconds", "beside"))
        rate = (F.count(F.lit(1)) * 1000 / F.sum(took / beside)).alias("model_rows_per_second")
        version = [F.max(F.col(name).getField("version")).alias(VERSION)] if following is not None else []
        percentiles = [F.percentile_approx(took, share / 100).alias(f"model_ms_p{share}") for share in (50, 99)]
        result = F.col(name).getField("result")
        bad = result.getField("error").isNotNull() if plan["on_error"] == "column" else result.isNull()
        counts = [F.count(F.lit(1)).alias("rows"), *percentiles, rate, *version, F.count_if(bad).alias("bad_rows")]
        df = df.observe(metrics, *counts)
    return df, name


def _query_run(run_dir: str, metrics: str, signature: Signature) -> QueryRun:
    from tritium.predict.query_run import QueryRun  # Executors don't have it.

    return QueryRun(run_dir, metrics, signature)


def _report(spark: Any, metrics: str, callbacks: Sequence[Callback], run: QueryRun | None, column: str) -> None:
    """Make an event of what is observed of each micro-batch; see `on_micro_batch`."""
    from tritium.spark.progress import on_micro_batch

    def scored(progress: Any, observed: Mapping[str, Any]) -> None:
        seconds = progress.durationMs.get("triggerExecution", 0) / 1000
        place: dict[str, Any] = {"query": str(progress.id), "batch": progress.batchId, "seconds": seconds}
        event = MicroBatchScored(metrics=metrics, **place, **observed)
        for callback in callbacks:
            callback(stamped(event))

    if run is None:
        on_micro_batch(spark, metrics, scored)
    else:
        on_micro_batch(spark, metrics, scored, run.ended, column)


def output_names(signature: Signature, asked: Sequence[str] | None) -> list[str]:
    """Return the names of the columns that `score` adds. Raises BadSetting where the number of `asked` does not fit."""
    if asked is None:
        return list(signature.output_columns)
    names = [asked] if isinstance(asked, str) else list(asked)
    classes = signature.task == "classification"
    outputs = ["prediction", "probability"] if classes else [output.name for output in signature.outputs]
    if len(names) not in (1, len(outputs)) or len(set(names)) != len(names):
        count, listed = len(outputs), ", ".join(outputs)
        choice = f"1 or {count} of them, each differently" if count > 1 else "it once"
        raise BadSetting(f"output columns {asked!r}: the model gives {count} ({listed}); name {choice}.")
    return names


@dataclass(frozen=True)
class ClassColumns:
    """The names of the columns that a classification adds beside `prediction` and `probability`; "": it adds none."""

    raw: str = ""
    """The logarithms of the probabilities, an ml vector, which Spark's evaluators read as `rawPrediction`."""
    word: str = ""
    """The class as a word, where the label was a column of strings."""
    label_index: str = ""
    """The index of the label's word, where the data has the label."""

    def of(self, signature: Signature, columns_before: Sequence[str]) -> dict[str, str]:
        """Return the columns to add to data with `columns_before`: name of the field → column."""
        if signature.task != "classification":
            return {}
        column_of_field = {"raw": self.raw}
        if signature.class_words:
            column_of_field["word"] = self.word
            if next(iter(signature.label_words)) in columns_before:
                column_of_field["label_index"] = self.label_index
        return {field: name for field, name in column_of_field.items() if name}


def refuse_taken(names: Sequence[str], columns_before: Sequence[str]) -> None:
    """Raise BadSetting where two of these names are equal, or the data already has a column of one of them."""
    if twice := [name for name, count in Counter(name.lower() for name in names).items() if count > 1]:
        raise BadSetting(f"The model would add two columns {twice[0]!r}. Choose other names with setParams(…).")
    lower = {name.lower() for name in columns_before}  # Spark compares names without their case.
    if taken := [name for name in names if name.lower() in lower]:
        columns, it = ("a column", "one") if len(taken) == 1 else ("columns", "them")
        raise BadSetting(
            f"The DataFrame has {columns} {', '.join(map(repr, taken))} already, and the model would add {it}. Rename "
            "what is there, or choose another name with setParams(prediction_col=…), probability_col=, "
            "raw_prediction_col=, prediction_label_col=, label_index_col= or error_col=."
        )


def _parts(model: Model, spark: Any, streaming: bool) -> tuple[dict[str, Any], Any]:
    """Return the parts from which workers restore the model, and the weights' handle. Sends weights that changed."""
    parts = model.engine.save(by_value=True)
    carried = streaming and is_connect(spark)
    now = (weights.session_of(spark), carried, parts.weights.checksums())
    known, name, sent = _sent.get(model, (None, "", None))
    if known != now:
        name = _weights_name(model, parts)
        sent = weights.send(spark, name, parts.weights, carried)
        _sent[model] = (now, name, sent)
    return _plan(model, parts, name), sent


def _weights_name(model: Model, parts: Parts) -> str:
    return f"{parts.weights.digest()}{os.path.splitext(model.engine.weights_file)[1]}"


def _plan(model: Model, parts: Parts, weights_name: str) -> dict[str, Any]:
    """Return the parts of a plan from which workers restore the model."""
    code = parts.code or b""
    plan = {
        "engine": model.engine.name,
        "signature": json.dumps(model.signature.to_json()),
        "weights": weights_name,
        "facts": dict(parts.facts),
    }
    content = hashlib.sha256(json.dumps(plan).encode() + code).hexdigest()[:32]
    return {**plan, "code": code, "content": content}


def _predicted(
    df: DataFrame, target: str, kind: pa.DataType, columns: Sequence[Column], payload: bytes, sent: Any
) -> Column:
    """Return a column of results of this type, computed once, not again for a filter on its result.

    target  : the function that workers call, "module:function".
    columns : its arguments, of `df`.
    """
    run = ship.entry(target, payload)

    def predict(batches: Any) -> Any:  # Not `run` itself, so that Spark finds the broadcast in the closure.
        return run(sent, batches)

    return computed(df, predict, _sql_type(kind), columns)


def computed(df: DataFrame, call: Callable[[Any], Any], kind: Any, columns: Sequence[Column]) -> Column:
    """Return the column that `call` computes from an iterator of the Arrow arrays of these columns of `df`.

    call : gets the arrays of a batch, or tuples of them where there are several columns. It is changed.
    kind : Spark's type of the results.

    It is nondeterministic, or a filter on its result would have it computed again.
    """
    if older.lacks(df.sparkSession):
        return older.through_pandas(df, call, kind, columns)
    from pyspark.sql.pandas.functions import arrow_udf

    array_type: Any = pa.Array if len(columns) == 1 else tuple[pa.Array, ...]
    # Spark infers the type of the UDF from these.
    call.__annotations__ = {"batches": Iterator[array_type], "return": Iterator[pa.Array]}
    call.__module__ = "__main__"  # Hence it is pickled by value: executors may lack Tritium.
    make = cast("Callable[..., Any]", arrow_udf)  # Its stubs require the deprecated functionType.
    return cast("Column", make(call, kind).asNondeterministic()(*columns))


def _sql_type(kind: pa.DataType) -> Any:
    """Return Spark's type for an Arrow type. As text it would have to be parsed by the JVM, twice."""
    from pyspark.sql import types as sql

    if pa.types.is_struct(kind):
        return sql.StructType([sql.StructField(one.name, _sql_type(one.type)) for one in kind])
    if pa.types.is_list(kind):
        return sql.ArrayType(_sql_type(kind.value_type))
    return getattr(sql, _SPARK[kind])()


_SPARK = {
    pa.float64(): "DoubleType",
    pa.float32(): "FloatType",
    pa.int64(): "LongType",
    pa.int32(): "IntegerType",
    pa.int16(): "ShortType",
    pa.int8(): "ByteType",
    pa.bool_(): "BooleanType",
    pa.string(): "StringType",
}


def _with_columns(
    df: DataFrame,
    signature: Signature,
    predicted: Column,
    names: Sequence[str],
    more: Mapping[str, str],
    on_error: OnError,
    errors: Sequence[str],
) -> DataFrame:
    """Return `df` with the UDF's result under the requested names; the JVM takes its struct apart.

    more   : the fields of `ClassColumns` → names. The JVM computes them of the result, where they are read.
    errors : the name of the column of reasons, which are beside the predictions in the result; []: they are not.
    """
    from pyspark.sql.functions import col

    classes = signature.task == "classification"
    if len(names) == 1 and not classes and not errors:
        scored = df.withColumn(names[0], predicted)
        return scored.where(col(f"`{names[0].replace('`', '``')}`").isNotNull()) if on_error == "skip" else scored
    whole = f"_tritium_{uuid.uuid4().hex}"
    predictions = col(whole).getField("predictions") if errors else col(whole)
    outputs = ["prediction", "probability"] if classes else [o.name for o in signature.outputs]
    columns = {}
    for name, output in zip(names, outputs, strict=False):
        is_struct = classes or len(names) > 1
        value = predictions.getField(output) if is_struct else predictions
        columns[name] = _vector(value, on_error) if output == "probability" and classes else value
    if "raw" in more:
        probability = predictions.getField("probability")
        columns[more["raw"]] = _vector(_logarithms(signature, probability), on_error)
    if "word" in more:
        columns[more["word"]] = _word(signature, predictions.getField("prediction"))
    if "label_index" in more:
        columns[more["label_index"]] = _index(signature, df)
    columns |= {name: col(whole).getField("error") for name in errors}
    scored = df.withColumn(whole, predicted)
    scored = scored.where(col(whole).isNotNull()) if on_error == "skip" else scored
    return scored.withColumns(columns).drop(whole)


def _vector(values: Column, on_error: OnError) -> Column:
    """Return an array as an ml vector; `array_to_vector` fails for a null, which there is none of with "fail"."""
    from pyspark.ml.functions import array_to_vector
    from pyspark.sql.functions import when

    vector = array_to_vector(values)
    return vector if on_error == "fail" else when(values.isNotNull(), vector)


def _logarithms(signature: Signature, probability: Column) -> Column:
    """Return the logarithm of each probability. Where it is 0, Spark's is null, and this one -Infinity."""
    from pyspark.sql import functions as F

    output = signature.outputs[0]
    classes = 2 if output.scalar else output.shape[0]

    def logarithm(value: Column) -> Column:
        return F.coalesce(F.log(value), F.lit(float("-inf")))

    if classes is None or classes > _UNROLLED_CLASSES:
        return F.transform(probability, logarithm)
    logarithms = F.array(*(logarithm(probability[i]) for i in range(classes)))
    return F.when(probability.isNotNull(), logarithms)


def _word(signature: Signature, prediction: Column) -> Column:
    """Return the word of a class index; null for a class that has none."""
    from pyspark.sql import functions as F

    return F.get(F.lit(list(signature.class_words)), prediction.cast("int"))


def _index(signature: Signature, df: DataFrame) -> Column:
    """Return the index of the label's word, as a double; an unknown word has the index after the last one's."""
    from pyspark.sql import functions as F

    words = list(signature.class_words)
    label = spark_column(df.schema, next(iter(signature.label_words)))
    place = F.array_position(F.lit(words), label).cast("double") - 1
    return F.when(place < 0, F.lit(float(len(words)))).otherwise(place)
