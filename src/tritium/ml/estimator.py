"""The base of estimators: run directories for param maps, and trainings that share an exchange (driver)."""

from __future__ import annotations

import contextvars
import dataclasses
import sys
import threading
import weakref
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pyspark.ml.base import Estimator
from pyspark.ml.util import MLReadable, MLReader, MLWritable, MLWriter

from tritium.errors import BadSetting
from tritium.gang.settings import Gang
from tritium.ml.extras import needed
from tritium.ml.params import ParamsReader, ParamsWriter, set_defaults, values
from tritium.ml.settings import PREDICTION_COLUMNS, Settings
from tritium.shown import call, changed, texts

if TYPE_CHECKING:
    from pyspark.ml.param import Param
    from pyspark.sql import DataFrame
    from typing_extensions import Self  # Only type checkers need it, and they bring it along.

    from tritium.data.exchange import Exchange
    from tritium.ml.backend import Backend
    from tritium.ml.fitting import Plan
    from tritium.ml.model import TrainedModel
    from tritium.model.model import Model


class GangEstimator(Estimator[Any], MLReadable[Any], MLWritable):
    """An estimator that trains on a Spark DataFrame, on the ranks of a gang on the same cluster.

    A framework's subclass defines its settings, its backend and its model. Every field of the settings and of `Gang` is
    a keyword, and by the decorator `with_params` a Param of the same name.
    """

    kind: ClassVar[type[Settings]]
    """The dataclass of the settings."""

    def _start(self, gang: Gang | None, keywords: Mapping[str, Any]) -> None:
        """Set the Params from the keywords of `__init__`, and check them once all that are required are given."""
        set_defaults(self, self.kind, Gang)
        settings: dict[str, Any] = {**keywords}
        if gang is not None:
            settings = {name: getattr(gang, name) for name in Gang.fields()} | settings
        known = (*self.kind.fields(), *Gang.fields())
        if unknown := [name for name in settings if name not in known]:
            raise self.kind.no_setting(unknown)
        self._set(**settings)
        self._param_map: dict[str, Any] = {}
        """The params that a tuner or fit(df, param_map) has given this copy."""
        self._fitted: dict[str, list[int]] = {}
        """Shared with all copies."""
        if all(self.isDefined(name) for name in self.kind.fields()):
            self.settings()
        Gang(**values(self, Gang))

    @abstractmethod
    def _backend(self) -> Backend[Any]:
        """Import the framework, and return its backend."""

    @abstractmethod
    def _model(self, model: Model) -> TrainedModel:
        """Return the transformer of a model."""

    def settings(self) -> tuple[Any, Gang]:
        """Return the settings and the Gang for `fit`. Raises BadSetting that names everything that is wrong."""
        from tritium.ml.fitting import combined

        return combined(self.kind, None, None, {**values(self, self.kind), **values(self, Gang)})

    def __repr__(self) -> str:
        return call(type(self).__name__, self._changed())

    def _changed(self) -> dict[str, Any]:
        values = {param.name: value for param, value in self._paramMap.items()}
        defaults = {param.name: value for param, value in self._defaultParamMap.items()}
        names = [name for name in (*self.kind.fields(), *Gang.fields()) if name in values]
        names.sort(key=lambda name: name in defaults)  # Those that must be given come first.
        return changed({name: values[name] for name in names}, defaults)

    def _repr_html_(self) -> str:
        """Show a notebook the settings that differ from their defaults."""
        from tritium.observe.page import section, table

        return section(type(self).__name__, table(("setting", "value"), list(texts(self._changed()).items())))

    def copy(self, extra: dict[Param[Any], Any] | None = None) -> Self:
        """Return a copy with these params, which trains in its own directory below `run_dir`, if that is given."""
        copy: Self = super().copy(extra)
        changes = {}
        for param, value in (extra or {}).items():  # A Pipeline passes those of its other stages, too.
            stage = "" if param.parent == self.uid else f"{param.parent.rpartition('_')[0]}."
            changes[stage + param.name] = value
        copy._param_map = {**self._param_map, **changes}
        return copy

    def _fit(self, dataset: DataFrame) -> TrainedModel:
        return self._trained(self._planned(dataset, bool(self._param_map)), dataset, title=_fold())

    def _planned(self, dataset: DataFrame, below: bool) -> Plan:
        """Return the plan of the training; `below`: in a directory of its param map below `run_dir`."""
        with needed(type(self).__name__):
            from tritium.ml import run_dirs
            from tritium.ml.fitting import prepare

            backend = self._backend()
        settings, gang = self.settings()
        if below and gang.run_dir is not None and "run_dir" not in self._param_map:
            place = run_dirs.below(str(gang.run_dir), self._param_map, dataset, self._fitted, backend.opened)
            gang = dataclasses.replace(gang, run_dir=place)
        return prepare(backend, dataset, settings, gang)

    def _trained(
        self, plan: Plan, dataset: DataFrame, exchange: Exchange | None = None, title: str = ""
    ) -> TrainedModel:
        from tritium.ml import run_dirs
        from tritium.ml.fitting import run

        notes = []
        opened, param_map = plan.backend.opened, run_dirs.shown(self._param_map, plan.backend.opened)
        if plan.gang.run_dir is not None and plan.gang.run_dir != self.getOrDefault("run_dir"):
            run_dirs.write_params(str(plan.gang.run_dir), self._param_map, opened)
            notes.append(f"param map {param_map}: its run directory is {plan.gang.run_dir}")
        elif self._param_map:
            notes.append(f"param map {param_map}")
        spark, ranks_given = getattr(dataset, "sparkSession", None), self.isSet("ranks")
        # The model has its own uid: by that of its estimator, a tuner would give it the `batch_size` of the training.
        model = run(plan, spark=spark, exchange=exchange, said=notes, ranks_given=ranks_given, title=title)
        settings = plan.settings
        return self._model(model).setParams(
            **{name: getattr(settings, name) for name in PREDICTION_COLUMNS},
            batch_size=settings.prediction_batch_size,
            device=settings.prediction_device,
            on_error=settings.on_error,
            error_col=settings.error_col,
        )

    def fitMultiple(self, dataset: DataFrame, paramMaps: Sequence[dict[Param[Any], Any]]) -> Iterator[tuple[int, Any]]:
        """Return an iterator of (index, model), one for each param map. Trainings on the same rows share one exchange.

        With `run_dir` each trains in its own directory below it, named after its param map.

        Several threads may use the iterator. The exchange is unpersisted after the last model, after an error, and when
        the iterator is dropped.
        """
        return Trainings(self, dataset, paramMaps)

    def write(self) -> MLWriter:
        """Return a writer of the Params; a model and functions are saved by value."""
        return ParamsWriter(self)

    @classmethod
    def read(cls) -> MLReader[Any]:
        """Return a reader of what `write` saved.

        Where another process has saved code, it needs `spark.tritium.trustModels=true`.
        """
        return ParamsReader(cls)


class Trainings(Iterator[tuple[int, Any]]):
    """An iterator that trains when asked for the next model; trainings on the same rows share a persisted exchange."""

    def __init__(
        self, estimator: GangEstimator, dataset: DataFrame, paramMaps: Sequence[dict[Param[Any], Any]]
    ) -> None:
        self._estimators = [estimator.copy(params) for params in paramMaps]
        self._plans = [one._planned(dataset, True) for one in self._estimators]
        where, count = _fold(), len(self._plans)
        self._titles = [" ".join(filter(None, (where, f"training {i}/{count}"))) for i in range(1, count + 1)]
        places = Counter(str(plan.gang.run_dir) for plan in self._plans if plan.gang.run_dir is not None)
        if twice := [place for place, count in places.items() if count > 1]:
            raise BadSetting(
                f"Two param maps are the same, and would train in one directory: {twice[0]}. Leave one out.",
                run_dir=twice,
            )
        self._dataset = dataset
        self._context = contextvars.copy_context()  # With `tr.listen`: CrossValidator trains in threads of its own.
        self._lock = threading.Lock()
        self._next = self._running = 0
        self._left = Counter(plan.reads for plan in self._plans)
        self._exchanges: dict[Any, Exchange] = {}
        self._error: BaseException | None = None
        weakref.finalize(self, _unpersist, self._exchanges)

    def __next__(self) -> tuple[int, Any]:
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._next == len(self._plans):
                raise StopIteration
            index, self._next = self._next, self._next + 1
            plan = self._plans[index]
            exchange = self._exchange(plan)
            self._running += 1
        try:
            train = self._context.copy().run
            title = self._titles[index]
            return index, train(self._estimators[index]._trained, plan, self._dataset, exchange, title)
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._release(plan)

    def _exchange(self, plan: Plan) -> Exchange | None:
        """Return the exchange that the trainings on these rows share; None where they can't, or only one is left."""
        from tritium.data.exchange import Exchange

        if isinstance(plan.gang.ranks, tuple):  # An exchange is made for a number of ranks, which is not known yet.
            return None
        if plan.gang.on != "cluster":
            return None
        if plan.reads not in self._exchanges and self._left[plan.reads] > 1:
            self._exchanges[plan.reads] = Exchange(
                plan.data, plan.gang.ranks, spark=self._dataset.sparkSession
            ).persist()
        return self._exchanges.get(plan.reads)

    def _release(self, plan: Plan) -> None:
        with self._lock:
            self._running -= 1
            self._left[plan.reads] -= 1
            if self._left[plan.reads] == 0 and plan.reads in self._exchanges:
                self._exchanges.pop(plan.reads).unpersist()
            if self._error is not None and self._running == 0:
                _unpersist(self._exchanges)


def _unpersist(exchanges: dict[Any, Exchange]) -> None:
    while exchanges:
        exchanges.popitem()[1].unpersist()


def _fold() -> str:
    """Return which part of a CrossValidator's fit calls this: "fold 2/3", "best" (the last fit, on all rows), else "".

    Spark does not tell an estimator: it is read from the local variables of `CrossValidator._fit`, and is "" where
    another version of Spark names them otherwise.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_fit" and frame.f_globals.get("__name__") == "pyspark.ml.tuning":
            known = frame.f_locals
            if "bestIndex" in known:
                return "best"
            number, folds = known.get("i"), known.get("nFolds")
            return f"fold {number + 1}/{folds}" if isinstance(number, int) and isinstance(folds, int) else ""
        frame = frame.f_back
    return ""
