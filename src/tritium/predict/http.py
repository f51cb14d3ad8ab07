"""`http_transformer`: a DataFrame, a batch or a stream, that calls a web service for its rows (driver)."""

from __future__ import annotations

import importlib.util
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.ml import Transformer
from pyspark.sql import types as sql

from tritium import ship
from tritium.checkpoint.code import code_of
from tritium.data.types import spark_column
from tritium.errors import BadData, BadFunction, BadSetting, WrongVersion, masked
from tritium.hints import suggest
from tritium.predict.http_calls import Calls
from tritium.predict.into import AT_ONCE, Scored, Work, score_into
from tritium.predict.spark import computed
from tritium.shown import call
from tritium.spark import is_connect
from tritium.spark.python import drivers_python

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_ARROW: dict[type[sql.DataType], pa.DataType] = {
    sql.StringType: pa.string(),
    sql.BooleanType: pa.bool_(),
    sql.ByteType: pa.int8(),
    sql.ShortType: pa.int16(),
    sql.IntegerType: pa.int32(),
    sql.LongType: pa.int64(),
    sql.FloatType: pa.float32(),
    sql.DoubleType: pa.float64(),
    sql.BinaryType: pa.binary(),
    sql.DateType: pa.date32(),
    sql.TimestampType: pa.timestamp("us", tz="UTC"),
}


def http_transformer(
    *,
    url: str,
    request: Callable[[dict[str, Any]], Any],
    response: Callable[[Any], Any] | None = None,
    returns: str | sql.DataType = "string",
    input_cols: Sequence[str] | None = None,
    output_col: str = "response",
    error_col: str | None = None,
    on_error: str = "fail",
    headers: Mapping[str, str] | Callable[[], Mapping[str, str]] | None = None,
    concurrency: int = 8,
    timeout: float = 60.0,
    retries: int = 5,
    backoff: float = 0.5,
    max_backoff: float = 60.0,
    rate: float | None = None,
    max_requests: int | None = None,
    tasks: int | None = None,
) -> HttpTransformer:
    """Return a Spark ML transformer that calls a web service once for each row, and adds what it answers.

    url          : of the service. The request is a POST unless `request` says otherwise.
    request      : row (a dict of the input columns) → body: a str or bytes as it is, anything else as JSON. Or the
                   whole request: a dict with "method" and any of "url", "params", "headers", "json", "data", "content".
    response     : a successful `httpx.Response` → value. None: its text.
    returns      : Spark's type of the value: "double", "struct<label: string, score: double>".
    input_cols   : the columns that go to `request`. None: all.
    output_col   : the column of the value.
    error_col    : with on_error="column", why a row has no value. None: `output_col` and "_error".
    on_error     : what becomes of a row without an answer: "fail" fails the job, "null" gives null, "column" gives null
                   and the reason in `error_col`.
    headers      : for every request, or a function without arguments that returns them, called on the executor once a
                   task, and again after a 401. A function is the place for keys: they never leave the executor then.
    concurrency  : requests at once in a task.
    timeout      : seconds for one request, from connecting to the last byte.
    retries      : how often a request is sent again: after 408, 425, 429, 500, 502, 503, 504, and where no complete
                   answer came. The service may thus get a request twice.
    backoff      : seconds before the first of them, drawn between half and all of it. It doubles with each, up to
                   `max_backoff`. A Retry-After of the service is waited for instead, by all rows of the task; one that
                   is longer than `max_backoff` ends the row's attempts.
    rate         : requests a second, retries included, of all tasks together; each gets rate / tasks.
    max_requests : requests of a job (a micro-batch), retries included; each task gets max_requests // tasks of them. A
                   row that comes later has no answer. A task that Spark starts again has its share again.
    tasks        : how many tasks call at once, at most: the DataFrame is coalesced to so many partitions. None: as it
                   is; with `rate` or `max_requests` Spark's default parallelism.

    Raises BadSetting and BadFunction for settings that can't work.
    """
    if importlib.util.find_spec("httpx") is None:
        raise WrongVersion("http_transformer needs httpx: pip install 'tritium[http]'.", library="httpx")
    if not isinstance(url, str) or not url.startswith(("http://", "https://")):
        raise BadSetting(f"url={url!r}: it begins with http:// or https://.", setting="url")
    if on_error not in ("fail", "null", "column"):
        raise BadSetting(
            f"on_error={on_error!r}: a row without an answer fails the job ('fail'), or gets null ('null'), or null "
            "and the reason in another column ('column').",
            setting="on_error",
        )
    _check_numbers(
        whole={"concurrency": (concurrency, 1), "retries": (retries, 0)},
        whole_or_none={"max_requests": max_requests, "tasks": tasks},
        seconds={"timeout": timeout, "backoff": backoff, "max_backoff": max_backoff},
    )
    if rate is not None and not (_is_number(rate) and rate > 0):
        raise BadSetting(f"rate={rate!r}: it is a number of requests a second, above 0.", setting="rate")
    for name, function, needed in (("request", request, True), ("response", response, False)):
        if not callable(function) and (needed or function is not None):
            raise BadFunction(f"{name}={function!r} is no function.", variable=name)
    settings = {
        "url": url,
        "request": request,
        "response": response,
        "headers": headers,
        "on_error": on_error,
        "concurrency": concurrency,
        "timeout": float(timeout),
        "retries": retries,
        "backoff": float(backoff),
        "max_backoff": float(max_backoff),
    }
    error_column = (error_col or f"{output_col}_error") if on_error == "column" else None
    return HttpTransformer(
        settings, returns, input_cols, (output_col, error_column), rate=rate, max_requests=max_requests, tasks=tasks
    )


class HttpTransformer(Transformer):
    """A transformer that calls a web service for each row, which `tr.http_transformer` returns.

    It is lazy, as all transformers are: the service is called when an action runs, and for each action again.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        returns: str | sql.DataType,
        input_cols: Sequence[str] | None,
        columns: tuple[str, str | None],
        *,
        rate: float | None,
        max_requests: int | None,
        tasks: int | None,
    ) -> None:
        super().__init__()
        self._settings, self._returns, self._input_cols = dict(settings), returns, input_cols
        self._output_col, self._error_col = columns
        self._rate, self._max_requests, self._tasks = rate, max_requests, tasks

    def __repr__(self) -> str:
        limits = {"rate": self._rate, "max_requests": self._max_requests, "tasks": self._tasks}
        shown = {name: self._settings[name] for name in ("on_error", "concurrency", "timeout", "retries")}
        shown |= {name: value for name, value in limits.items() if value is not None}
        return call("HttpTransformer", {"url": masked(self._settings["url"]), **shown})

    def score(
        self, df: DataFrame, *, into: str, resume: str | None = None, changed: str = "recompute", verbose: bool = True
    ) -> Scored:
        """Write a DataFrame with the answers part by part, and go on where a call with this `resume` has ended.

        The service is not called again for the parts that are finished. The arguments are those of a model's `score`.
        `rate` counts for all parts together.

        Raises BadSetting, also for `max_requests`, which counts for one job; ScoringFailed when a part fails.
        """
        if self._max_requests is not None:
            raise BadSetting(
                "max_requests= counts for one job, and score(into=…) runs one for each part. Score df.limit(…), or "
                "leave it out.",
                setting="max_requests",
            )
        service = self.copy()
        service._rate = None if self._rate is None else self._rate / AT_ONCE
        facts = {
            "url": masked(self._settings["url"]),
            "code of request and response": code_of([self._settings["request"], self._settings["response"]]).exact,
            "columns of the source": df.schema.simpleString(),
            "columns of the result": service.transform(df).schema.simpleString(),
        }
        work = Work(df, service.transform, facts, self._settings["on_error"], changed, verbose)
        return score_into(work, into, resume)

    def _transform(self, dataset: DataFrame) -> DataFrame:
        """Return the DataFrame with the answers, lazily. Raises BadData for columns that are missing or there."""
        from pyspark.sql import functions as F

        names = [self._output_col, *([self._error_col] if self._error_col else [])]
        lower = {name.lower() for name in dataset.columns}
        if taken := [name for name in names if name.lower() in lower]:
            raise BadData(
                f"The DataFrame has a column {taken[0]!r} already. Choose another name with output_col= or error_col=.",
                column=taken[0],
            )
        inputs = dataset.columns if self._input_cols is None else list(self._input_cols)
        if missing := [name for name in inputs if name not in dataset.columns]:
            raise BadData(
                f"The DataFrame has no column {missing[0]!r}.{suggest(missing[0], dataset.columns)}", column=missing[0]
            )
        returns = sql.DataType.fromDDL(self._returns) if isinstance(self._returns, str) else self._returns
        tasks = self._task_count(dataset)
        frame = dataset if tasks is None else dataset.coalesce(tasks)
        row = F.struct(*(spark_column(dataset.schema, name).alias(name) for name in inputs))
        answered = _answered(dataset, row, returns, self._payload(returns, tasks))
        whole = f"_tritium_{uuid.uuid4().hex}"
        columns = dict(zip(names, (F.col(whole).getField("value"), F.col(whole).getField("error")), strict=False))
        return frame.withColumn(whole, answered).withColumns(columns).drop(whole)

    def _task_count(self, df: DataFrame) -> int | None:
        if self._tasks is None and (self._rate is not None or self._max_requests is not None):
            if is_connect(df.sparkSession):
                raise BadSetting(
                    "rate= and max_requests= are divided by the number of tasks, which Spark Connect does not report: "
                    "give tasks=, the cores of the cluster, say.",
                    setting="tasks",
                )
            tasks = int(df.sparkSession.sparkContext.defaultParallelism)
        else:
            tasks = self._tasks or 0
        if self._max_requests is not None and self._max_requests < tasks:
            tasks = max(1, self._max_requests)
        return tasks or None

    def _payload(self, returns: sql.DataType, tasks: int | None) -> bytes:
        calls = Calls(
            **self._settings,
            arrow_type=_arrow(returns),
            rate=None if self._rate is None or tasks is None else self._rate / tasks,
            max_requests=None if self._max_requests is None or tasks is None else self._max_requests // tasks,
        )
        try:
            return ship.pickle(calls)
        except Exception as error:  # Pickling runs code of the captured objects, which may raise anything.
            raise BadFunction(
                f"request, response or headers can't go to the executors: {error}. Make what can't be pickled inside "
                "the function."
            ) from error


def _answered(df: DataFrame, row: Column, returns: sql.DataType, payload: bytes) -> Column:
    """Return the column of the answers to each `row`, a struct of columns of `df`."""
    run = ship.entry("tritium.predict.http_calls:call", payload)

    def answers(batches: Any) -> Any:
        return run(batches)

    kind = sql.StructType([sql.StructField("value", returns), sql.StructField("error", sql.StringType())])
    with drivers_python(df.sparkSession):
        return computed(df, answers, kind, [row])


def _arrow(kind: sql.DataType) -> pa.DataType:
    """Return the Arrow type of a Spark type. Raises BadSetting for one that has none here."""
    if isinstance(kind, sql.ArrayType):
        return pa.list_(_arrow(kind.elementType))
    if isinstance(kind, sql.StructType):
        return pa.struct([(one.name, _arrow(one.dataType)) for one in kind.fields])
    if isinstance(kind, sql.MapType):
        return pa.map_(_arrow(kind.keyType), _arrow(kind.valueType))
    if type(kind) not in _ARROW:
        names = ", ".join(one.typeName() for one in _ARROW)
        raise BadSetting(
            f"returns={kind.simpleString()!r}: a service's value is one of {names}, or an array, a struct or a "
            "map of these.",
            setting="returns",
        )
    return _ARROW[type(kind)]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_numbers(
    whole: Mapping[str, tuple[Any, int]], whole_or_none: Mapping[str, Any], seconds: Mapping[str, Any]
) -> None:
    """Raise BadSetting for a number that is none, or too small."""
    optional = {name: (value, 1) for name, value in whole_or_none.items() if value is not None}
    for name, (value, least) in {**whole, **optional}.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise BadSetting(f"{name}={value!r}: it is a whole number of at least {least}.", setting=name)
    for name, value in seconds.items():
        if not _is_number(value) or not value > 0:
            raise BadSetting(f"{name}={value!r}: it is a number of seconds above 0.", setting=name)
