"""The parameters of `horovod.spark`'s estimators and models as Spark ML Params, from one table (driver).

A parameter is mapped, or has no effect (a TritiumWarning once where it is given), or is refused (BadSetting).
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.param.shared import HasOutputCols

from tritium.errors import BadSetting, TritiumWarning

C = TypeVar("C", bound=type)
FEEDING = "rows go from Spark straight to the ranks, and no reader is in between"


@dataclass(frozen=True)
class Parameter:
    """A parameter: its name, what it is for, its default, and why it is not needed or refused, if so."""

    name: str
    doc: str
    default: Any = None
    convert: Callable[[Any], Any] | None = None
    accessor: str | None = None
    """What follows `get` and `set`; None: the name in camel case."""
    unneeded: str = ""
    refused: str = ""

    @property
    def methods(self) -> str:
        """What follows `get` and `set`."""
        return self.accessor or "".join(part.capitalize() for part in self.name.split("_"))


_int, _bool, _str = TypeConverters.toInt, TypeConverters.toBoolean, TypeConverters.toString
_strings, _floats = TypeConverters.toListString, TypeConverters.toListFloat

ESTIMATOR = (
    Parameter("num_proc", "the number of processes; None: as many as Spark has slots"),
    Parameter("train_reader_num_workers", "readers of training data", 2, None, "TrainReaderNumWorker", FEEDING),
    Parameter("val_reader_num_workers", "readers of validation data", 2, None, "ValReaderNumWorker", FEEDING),
    Parameter("reader_pool_type", "the kind of readers", "thread", unneeded=FEEDING),
    Parameter("optimizer", "the optimizer"),
    Parameter("model", "the model"),
    Parameter("backend", "what runs the training; None: SparkBackend(num_proc)"),
    Parameter("store", "where checkpoints, logs and the model are kept"),
    Parameter("metrics", "the metrics", ()),
    Parameter("loss", "the loss, or a list with one for each label"),
    Parameter("gradient_compression", "how gradients are compressed between ranks"),
    Parameter(
        "compress_sparse_cols",
        "whether sparse vectors are kept compressed on disk",
        False,
        _bool,
        unneeded="nothing is written to disk on the way",
    ),
    Parameter("loss_weights", "a weight for each loss", None, _floats),
    Parameter("sample_weight_col", "the column of the weights of rows", None, _str),
    Parameter("feature_cols", "the columns of features, in the order of the model's inputs", None, _strings),
    Parameter("label_cols", "the columns of labels, in the order of the model's outputs", None, _strings),
    Parameter("continuous_cols", "continuous columns", None, _strings, unneeded="only NVTabular's loader reads it"),
    Parameter("categorical_cols", "categorical columns", None, _strings, unneeded="only NVTabular's loader reads it"),
    Parameter("validation", "a fraction of the rows, or a column that is true or above 0 for those to validate on"),
    Parameter("callbacks", "callbacks", ()),
    Parameter("batch_size", "rows of a rank in a batch", 32, _int),
    Parameter("val_batch_size", "rows of a rank in a validation batch; None: batch_size", None, _int),
    Parameter("epochs", "epochs", 1, _int),
    Parameter("train_steps_per_epoch", "steps of an epoch; None: all rows", None, _int),
    Parameter("validation_steps_per_epoch", "steps of a validation; None: all rows", None, _int),
    Parameter("random_seed", "the seed of the framework and of the order of rows", None, _int),
    Parameter(
        "shuffle_buffer_size",
        "rows that are shuffled together",
        None,
        _int,
        "ShufflingBufferSize",
        "every epoch is a full permutation of the rows; shuffle=False keeps their order",
    ),
    Parameter("shuffle", "whether rows to train on are shuffled", True, _bool),
    Parameter("verbose", "0: silent, 1: progress, 2: one line an epoch", 1, _int),
    Parameter(
        "partitions_per_process",
        "Parquet partitions of a process",
        10,
        _int,
        unneeded="no Parquet is written on the way",
    ),
    Parameter("run_id", "names the run in the store; one that has a checkpoint there continues from it", None, _str),
    Parameter("transformation_fn", "changes a pandas DataFrame of rows before they are used"),
    Parameter("transformation_edit_fields", "(name, numpy dtype, shape, is_nullable) of what transformation_fn makes"),
    Parameter("transformation_removed_fields", "columns that transformation_fn takes away"),
    Parameter("label_shapes", "the shape that each label is brought into"),
    Parameter(
        "inmemory_cache_all", "whether rows are read once, which they always are", False, _bool, "InMemoryCacheAll"
    ),
    Parameter("use_gpu", "whether to train on a GPU where there is one", True, _bool),
    Parameter(
        "mp_start_method",
        "how Python's multiprocessing starts processes",
        None,
        _str,
        unneeded="reading rows starts no processes",
    ),
    Parameter("backward_passes_per_step", "batches whose gradients are added up before a step", 1, _int),
    Parameter(
        "tensorflow_dataset_prefetch_buffer_size",
        "batches that are prefetched",
        0,
        _int,
        unneeded="batches are made ahead anyway",
    ),
)
UNCOMPRESSED = Parameter(
    "gradient_compression",
    "how gradients are compressed between ranks",
    unneeded="gradients travel with all their digits",
)
ONE_PASS = Parameter(
    "backward_passes_per_step",
    "batches whose gradients are added up before a step",
    1,
    _int,
    unneeded="as in Horovod. The optimizer, or the Trainer, has a setting for it",
)
DATA_MODULE = Parameter(
    "data_module",
    "a class that reads the Parquet files",
    refused="there are no Parquet files to read: the rows come from the DataFrame. Leave it out.",
)
MODEL = (
    Parameter("history", "what was measured in each epoch"),
    Parameter("model", "the trained model"),
    Parameter("feature_columns", "the columns of features"),
    Parameter("label_columns", "the columns of labels"),
    Parameter("run_id", "the run in the store that trained the model", None, _str),
    Parameter("_metadata", "the types and shapes of features and labels"),
)
SPELT = {"LabelColumns": "LabelColoumns"}
"""A setter's name → how horovod.spark spells it."""


def with_params(*parameters: Parameter) -> Callable[[C], C]:
    """Return a class decorator that makes each parameter a Param, with `get…` and `set…` for it."""

    def decorate(cls: C) -> C:
        known = {**getattr(cls, "parameters", {}), **{one.name: one for one in parameters}}
        cls.parameters = known  # type: ignore[attr-defined]
        for one in parameters:
            convert: Any = one.convert
            setattr(cls, one.name, Param(Params._dummy(), one.name, one.doc, convert))
            if one.name.startswith("_"):
                continue
            for prefix, make in (("get", _getter), ("set", _setter)):
                method = prefix + one.methods
                if method not in vars(cls):
                    setattr(cls, method, make(one.name, method))
                if prefix == "set" and one.methods in SPELT:
                    setattr(cls, prefix + SPELT[one.methods], vars(cls)[method])
        return cls

    return decorate


def _getter(name: str, method: str) -> Any:
    def get(self: Any) -> Any:
        return self.getOrDefault(getattr(self, name))

    get.__name__, get.__doc__ = method, f"Return the value of `{name}`."
    return get


def _setter(name: str, method: str) -> Any:
    def set(self: Any, value: Any) -> Any:
        return self._set(**{name: value})

    set.__name__, set.__doc__ = method, f"Set `{name}`, and return this object."
    return set


class Parameters(Params):
    """Params of a table, given as keywords; None means that one is not given."""

    parameters: dict[str, Parameter]

    def _begin(self, given: dict[str, Any]) -> None:
        """Set defaults, and what is given. Raises TypeError for a name that the table has not, and BadSetting."""
        unknown = [name for name in given if name not in self.parameters]
        if unknown:
            raise TypeError(f"{type(self).__name__}.__init__() got an unexpected keyword argument {unknown[0]!r}")
        defaults = {
            name: list(one.default) if one.default == () else one.default for name, one in self.parameters.items()
        }
        self._setDefault(**defaults)
        self._set(**{name: value for name, value in given.items() if value is not None})

    def _set(self, **given: Any) -> Any:
        """Set parameters. Raises BadSetting for one that is refused; warns about one that has no effect."""
        check(type(self).__name__, [(self.parameters[n], v) for n, v in given.items() if n in self.parameters])
        return super()._set(**given)

    def setParams(self, **given: Any) -> Any:
        """Set parameters by name."""
        return self._set(**given)


_said: set[str] = set()


def check(whose: str, given: Iterable[tuple[Parameter, Any]]) -> None:
    """Raise BadSetting for a parameter that is refused, and warn once about one that has no effect."""
    for one, value in given:
        if value is None or not (one.refused or one.unneeded) or value == one.default:
            continue
        if one.refused:
            raise BadSetting(f"{whose}({one.name}=…): {one.refused}", setting=one.name)
        if one.unneeded and one.name not in _said:
            _said.add(one.name)
            warnings.warn(f"{whose}({one.name}=…) has no effect: {one.unneeded}.", TritiumWarning, stacklevel=6)


def signature(*parameters: Parameter) -> inspect.Signature:
    """Return the signature of an `__init__` with these keywords."""
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Signature(
        [own, *(inspect.Parameter(p.name, kind, default=p.default) for p in {p.name: p for p in parameters}.values())]
    )


@with_params(*ESTIMATOR)
class EstimatorParams(Parameters):
    """The parameters that the estimators share."""


@with_params(*MODEL)
class ModelParams(HasOutputCols, Parameters):
    """The parameters that the models share."""

    def setOutputCols(self, value: list[str]) -> Any:
        """Set the names of the columns that `transform` adds, one for each label."""
        return self._set(outputCols=value)

    def _get_metadata(self) -> Any:
        return self.getOrDefault(self._metadata)  # type: ignore[attr-defined]
