"""A trained model as a Spark ML transformer, for batches and for streams (driver)."""

from __future__ import annotations

import html
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

from pyspark.errors import PySparkRuntimeError
from pyspark.ml import Model as SparkModel
from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.param.shared import HasOutputCols
from pyspark.ml.util import DefaultParamsReader, MLReadable, MLReader, MLWritable, MLWriter

from tritium.data.types import is_spark
from tritium.errors import BadSetting, ModelError
from tritium.ml.params import write_metadata
from tritium.model.calls import BatchSize, Computing
from tritium.model.model import Model, load
from tritium.model.published import versions
from tritium.model.signature import Signature
from tritium.model.table import fields
from tritium.model.trust import Trust
from tritium.predict.following import Followed, seconds_of
from tritium.predict.local import score_pandas
from tritium.predict.spark import ClassColumns, output_names, score
from tritium.shown import call, changed
from tritium.spark.inside import hadoop

if TYPE_CHECKING:
    from tritium.predict.check import Checks
    from tritium.predict.into import Scored

M = TypeVar("M", bound="TrainedModel")
_FOLDER = "model"


class TrainedModel(SparkModel, HasOutputCols, MLReadable[Any], MLWritable):
    """A model that adds its predictions to a DataFrame: Spark's, batch or streaming, or one of pandas.

    One number per row is a column `prediction` (double). A classification is `prediction` (the class index, double),
    `probability` (an ml vector), `rawPrediction` (their logarithms, computed where the column is read) and, where the
    label was a column of strings, `prediction_label` (the class as a word). Anything else is an array, several outputs
    a struct, in `prediction`.
    """

    batch_size: Param[BatchSize] = Param(
        Params._dummy(),
        "batch_size",
        'rows that the module is called with at once, or "auto": each worker finds the size',
        lambda value: value if value == "auto" else TypeConverters.toInt(value),
    )
    device: Param[str] = Param(
        Params._dummy(),
        "device",
        'where the executors compute: "cpu", or "cuda" for the GPU of the Spark task',
        TypeConverters.toString,
    )
    prediction_col: Param[str] = Param(
        Params._dummy(), "prediction_col", "the column of the predictions", TypeConverters.toString
    )
    probability_col: Param[str] = Param(
        Params._dummy(), "probability_col", "the column of a classification's probabilities", TypeConverters.toString
    )
    raw_prediction_col: Param[str] = Param(
        Params._dummy(),
        "raw_prediction_col",
        "the column of the logarithms of a classification's probabilities, as Spark's evaluators take them; \"\": none",
        TypeConverters.toString,
    )
    prediction_label_col: Param[str] = Param(
        Params._dummy(),
        "prediction_label_col",
        'the column of the class as a word, where the label was a column of strings; "": none',
        TypeConverters.toString,
    )
    label_index_col: Param[str] = Param(
        Params._dummy(),
        "label_index_col",
        'where the data has the label, a column of strings: the column of its index, for Spark\'s evaluators; "": none',
        TypeConverters.toString,
    )
    on_error: Param[str] = Param(
        Params._dummy(),
        "on_error",
        "what becomes of a row that the model can't take (for a null or an unknown word, say), or for which it raises: "
        '"fail" fails the job, "skip" leaves it out, "null" gives it nulls as predictions, "column" also the reason in '
        "`error_col`",
        TypeConverters.toString,
    )

    error_col: Param[str] = Param(
        Params._dummy(),
        "error_col",
        'with on_error="column": the column of the reason why a row has no prediction, null for all others',
        TypeConverters.toString,
    )

    metrics: Param[str] = Param(
        Params._dummy(),
        "metrics",
        "the name under which Spark observes `rows`, `model_ms_p50`, `model_ms_p99` and `model_rows_per_second` of "
        'each query, in lastProgress["observedMetrics"] of a stream; "": it observes nothing',
        TypeConverters.toString,
    )

    run_dir: Param[str] = Param(
        Params._dummy(),
        "run_dir",
        "a local directory for what happens in a stream's queries (rows, times, versions, bad rows, errors), as "
        '`tritium ui` shows it; "": none is written. `metrics` is its name, where it is not set',
        TypeConverters.toString,
    )

    check: Param[str] = Param(
        Params._dummy(),
        "check",
        "whether rows with numbers, words and nulls unlike those of the training are counted while they are scored: "
        '"off", "count" (read `checks()`), or "warn", which warns after the first action, too',
        TypeConverters.toString,
    )

    def __init__(self, model: Model, *, output_cols: Sequence[str] | None = None, **params: Any) -> None:
        """Wrap a model. `params` are any of the parameters by name."""
        super().__init__()
        self.model = model
        self._counted: Any = None
        self._followed: Followed | None = None
        self._setDefault(
            batch_size=1024,
            device="cpu",
            prediction_col="prediction",
            probability_col="probability",
            raw_prediction_col="rawPrediction",
            prediction_label_col="prediction_label",
            label_index_col="",
            metrics="",
            run_dir="",
            on_error="fail",
            error_col="prediction_error",
            check="off",
        )
        self.setParams(**params)
        if output_cols is not None:
            self.setOutputCols(output_cols)

    def setParams(self: M, **params: Any) -> M:
        """Set any of the parameters by name: `setParams(batch_size=4096, device="cuda")`."""
        unknown = [name for name in params if not self.hasParam(name)]
        if unknown:
            known = ", ".join(p.name for p in self.params)
            raise BadSetting(
                f"{type(self).__name__} has no parameter {', '.join(map(repr, unknown))}. It has: {known}."
            )
        self._set(**params)
        return self

    def setOutputCols(self: M, value: Sequence[str]) -> M:
        """Set the names of the columns that `transform` adds: one for each output, or one for them all.

        A classification then adds `prediction` and `probability`, or the first alone, and no other columns.
        """
        self._set(outputCols=output_names(self.signature, value))
        return self

    def __repr__(self) -> str:
        values = {param.name: value for param, value in self._paramMap.items()}
        defaults = {param.name: value for param, value in self._defaultParamMap.items()}
        return call(type(self).__name__, changed(values, defaults), first=self.model.describe())

    def _repr_html_(self) -> str:
        """Show a notebook the curves of the training below the model."""
        from tritium.observe.page import of_history

        return f"<code>{html.escape(repr(self))}</code>{of_history(self.history)}"

    @property
    def signature(self) -> Signature:
        """The columns, dtypes and shapes of the model's inputs and outputs."""
        return self.model.signature

    @property
    def label_words(self) -> dict[str, list[str]]:
        """Label column of strings → its words, at the index that stands for each; empty where there is none."""
        return self.model.label_words

    @property
    def history(self) -> list[dict[str, Any]]:
        """One dict per epoch of the training."""
        return self.model.history

    def follow(
        self: M,
        path: str,
        *,
        every: str | float = "30s",
        trusted: bool | str | Sequence[str] = False,
        spool: str | None = None,
    ) -> M:
        """Return a transformer that scores with the newest version in `path`, with the parameters of this one.

        A stream takes a newer version while it runs, at the begin of a micro-batch; a batch has the one that is the
        newest when `transform` is called. Both have its number in the column `model_version`. A version is refused if
        its files are damaged, its code is not trusted or can't be loaded, or its inputs or outputs are not those of
        this model: a warning and the event `ModelVersion` say why, and the version before goes on. Version 0 is this
        model itself, where there is no other.

        path    : the directory of versions that `tr.publish` fills, local or any fsspec URL; or an alias of MLflow's
                  registry, "models:/bikes@champion", whose version is then the newest (needs tritium[mlflow], and
                  `spool` for a stream).
        every   : how often a stream looks for a newer version: "30s", "5m", or seconds. It is taken at the latest
                  after twice this time and 5 s.
        trusted : the code of the versions that may run, as of `tr.load`.
        spool   : a directory that the driver writes and the executors read, local to all or any fsspec URL. None: a
                  directory in `path`.

        Raises BadSetting, ModelError where there is no such directory, and MlflowException where no such alias is.
        """
        Trust.of(trusted)
        versions(path)
        following = self.copy()
        following._followed = Followed(path.rstrip("/"), self.model, trusted, seconds_of(every), spool)
        return following

    def stop_following(self) -> None:
        """Look for no newer versions any more, for the streams that this transformer has transformed.

        Call it when their queries have ended: they can't go on, as what the executors read of newer versions is
        removed. The end of the Spark session or of this process does the same.
        """
        while self._followed is not None and self._followed.running:
            self._followed.running.pop().stop()

    def _transform(self, dataset: Any) -> Any:
        """Return a pandas DataFrame's copy with predictions, computed without Spark, or a lazy DataFrame of Spark."""
        apply: Any = score if is_spark(dataset) else score_pandas
        return apply(
            self.model,
            self._checked(dataset),
            output_cols=self._names(),
            class_cols=self._class_columns(),
            batch_size=self.getOrDefault(self.batch_size),
            device=self.getOrDefault(self.device),
            on_error=self.getOrDefault(self.on_error),
            error_col=self.getOrDefault(self.error_col),
            computes=self._computing(),
            followed=self._followed,
            **({n: self.getOrDefault(n) for n in ("metrics", "run_dir")} if is_spark(dataset) else {}),
        )

    def score(
        self,
        df: Any,
        *,
        into: str,
        resume: str | None = None,
        on_error: str | None = None,
        changed: str = "recompute",
        dedupe: bool = False,
        verbose: bool = True,
    ) -> Scored:
        """Write a Spark DataFrame with predictions part by part, and go on where a call with this `resume` has ended.

        into     : "parquet:PATH", a directory that must be empty or new; "delta:PATH", a table to which rows are added;
                   or the name of a table.
        resume   : a directory, or an fsspec URL, for the records of finished parts. Call again with the same one after
                   an error or a killed driver, and only the rest is scored. None: nothing is kept.
        on_error : what becomes of a row that the model can't take, as the parameter of this name. None: as it is set.
        changed  : a finished part whose rows have changed in the source is computed again ("recompute"), or is
                   DataChanged ("refuse").
        dedupe   : score equal inputs once, and join the predictions to all rows. Needs `resume`, which the executors
                   write to.
        verbose  : show the progress.

        Raises BadSetting before anything starts; ScoringFailed when a part fails, and keeps the others.
        """
        from tritium.predict.dedupe import score_all

        if self._followed is not None:
            raise BadSetting(
                "score(into=…) takes one version of the model for all rows, and this transformer follows those of a "
                "directory. Load the version that you want: tr.load(path).transformer()."
            )
        transformer = self if on_error is None else self.copy().setParams(on_error=on_error)
        return score_all(
            transformer.model,
            transformer.transform,
            df,
            into=into,
            resume=resume,
            on_error=transformer.getOrDefault(transformer.on_error),
            settings={"device": transformer.getOrDefault(transformer.device), **asdict(transformer._computing())},
            changed=changed,
            dedupe=dedupe,
            verbose=verbose,
        )

    def _checked(self, dataset: Any) -> Any:
        """Return the DataFrame, counting rows unlike those of the training where `check` says so."""
        mode = self.getOrDefault(self.check)
        if mode == "off":
            return dataset
        from tritium.predict import check as checking

        checking.check_check(mode)
        if is_spark(dataset):
            fields(self.signature, dataset.schema)  # Raises for columns that do not fit.
            dataset, self._counted = checking.observed(self.signature, dataset, mode)
        else:
            self._counted = checking.of_table(self.signature, dataset)
            if mode == "warn":
                checking.warn(self._counted)
        return dataset

    def checks(self, query: Any = None) -> Checks:
        """Return how many rows of the DataFrame that was transformed last are unlike those of the training.

        Waits for its first action; later ones are not counted. `str()` of the result says it in words.

        query : of a stream, the StreamingQuery: the sum over the micro-batches in its `recentProgress`.

        Raises BadSetting unless a DataFrame was transformed with check="count" or "warn".
        """
        if self._counted is None or isinstance(self._counted, str) != (query is not None):
            raise BadSetting(
                "checks() is for a DataFrame that this object has transformed with check='count' or 'warn'; of a "
                "stream give the query, checks(query)."
            )
        from tritium.predict import check as checking

        if isinstance(self._counted, checking.Checks):
            return self._counted
        if query is not None:
            return checking.of_query(self.signature, query, self._counted)
        return checking.checks_of(self.signature, self._counted.get)

    def _computing(self) -> Computing:
        """Return how numbers are computed. A framework's model overrides it where there is a choice."""
        return Computing()

    def _names(self) -> list[str]:
        """Return the names of the columns that `transform` adds."""
        if self.isDefined(self.outputCols):
            return list(self.getOutputCols())
        names = [self.getOrDefault(self.prediction_col)]
        return [*names, self.getOrDefault(self.probability_col)][: len(self.signature.output_columns)]

    def _class_columns(self) -> ClassColumns:
        """Return the names of what a classification adds beside those; nothing where the user has named them all."""
        if self.isDefined(self.outputCols):
            return ClassColumns()
        names = (self.raw_prediction_col, self.prediction_label_col, self.label_index_col)
        return ClassColumns(*map(self.getOrDefault, names))

    def predict(self, data: Any) -> Any:
        """Return what `tr.Model.predict` returns for a pandas DataFrame, an Arrow table, an array or a tensor.

        Raises BadSetting for a Spark DataFrame, to which `transform` adds the predictions.
        """
        if is_spark(data):
            raise BadSetting("predict takes no Spark DataFrame: model.transform(df) adds the predictions to it.")
        return self.model.predict(
            data,
            batch_size=self.getOrDefault(self.batch_size),
            device=self.getOrDefault(self.device),
            computes=self._computing(),
        )

    def write(self) -> ModelWriter:
        """Return a Spark ML writer: `.save(path)`, `.overwrite().save(path)`."""
        return ModelWriter(self)

    @classmethod
    def read(cls: type[M]) -> ModelReader[M]:
        """Return a Spark ML reader: `.load(path)`."""
        return ModelReader(cls)


class ModelWriter(MLWriter):
    """A writer of `model/`, which `tr.load` reads, and then `metadata/`, the parameters as Spark ML keeps them.

    On classic Spark it writes through Hadoop's file systems, so that a path means the same as in the rest of the
    pipeline. On Connect the client writes `model/` through fsspec: give a URL that client and server both reach.
    """

    def __init__(self, instance: TrainedModel) -> None:
        super().__init__()
        self.instance = instance

    def save(self, path: str) -> None:
        """Save to `path`. Raises BadSetting if it exists (without `overwrite()`), or no Spark session is active."""
        try:
            spark = self.sparkSession
        except PySparkRuntimeError as error:
            raise BadSetting(
                f"No Spark session is active, through which a {type(self.instance).__name__} is saved. "
                "model.model.save(path) needs none, and tr.load(path) reads it."
            ) from error
        if not hadoop.used(spark):
            self.instance.model.save(os.path.join(path, _FOLDER), overwrite=self.shouldOverwrite)
        else:
            if self.shouldOverwrite:
                self._handleOverwrite(path)
            _save_by_hadoop(spark, self.instance.model, path)
        write_metadata(self.instance, path, spark, mode="overwrite" if self.shouldOverwrite else "error")


class ModelReader(MLReader[M]):
    """A reader of what ModelWriter wrote.

    `spark.tritium.trustModels` says what loading may run, as `trusted` of `tr.load`: `true`, or the functions and
    packages by name, separated by commas. What this process has saved itself is trusted, by its checksums.
    """

    def __init__(self, kind: type[M]) -> None:
        super().__init__()
        self._kind = kind

    def load(self, path: str) -> M:
        """Return the model at `path`."""
        spark = self.sparkSession
        metadata = DefaultParamsReader.loadMetadata(path, spark)
        trust = str(spark.conf.get("spark.tritium.trustModels", "false"))
        if not hadoop.used(spark):
            model = load(os.path.join(path, _FOLDER), trusted=trust)
        else:
            with _local_copy(spark, path) as folder:
                model = load(folder, trusted=trust)
        transformer = self._kind(model)
        transformer._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(transformer, metadata)
        return transformer


def _save_by_hadoop(spark: Any, model: Model, path: str) -> None:
    target = hadoop.Folder(spark, path)
    if target.exists():
        raise BadSetting(
            f"There is something at {path!r} already. Choose another path, or write().overwrite().save(path)."
        )
    if target.local is not None:
        model.save(os.path.join(target.local, _FOLDER))
        return
    with tempfile.TemporaryDirectory(prefix="tritium-") as folder:
        model.save(os.path.join(folder, _FOLDER))
        target.upload(folder, _FOLDER)


@contextmanager
def _local_copy(spark: Any, path: str) -> Iterator[str]:
    """Yield the `model/` directory as a local path; what was mapped from it stays readable after the block."""
    source = hadoop.Folder(spark, path)
    if source.local is not None:
        yield os.path.join(source.local, _FOLDER)
        return
    if not source.exists(_FOLDER):
        raise ModelError(f"No model at {path!r}: there is no {_FOLDER}/ in it.")
    with tempfile.TemporaryDirectory(prefix="tritium-") as folder:
        source.download(_FOLDER, folder)
        yield os.path.join(folder, _FOLDER)
