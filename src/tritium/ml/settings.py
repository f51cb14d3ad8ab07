"""What and how to train: `TorchSettings`, each setting written once (any process)."""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal

from tritium.errors import BadSetting
from tritium.gang.settings import ELSEWHERE, Gang, as_int
from tritium.hints import question, suggest

FEATURES, LABEL, WEIGHT = "features", "label", "weight"
DEFAULT_BATCH_SIZE = 32
_ONE_SCORE = ("BCEWithLogitsLoss", "BCELoss", "binary_cross_entropy", "binary_cross_entropy_with_logits")
_WHOLE = (
    *("batch_size", "global_batch_size", "epochs", "gradient_accumulation", "seed"),
    *("checkpoint_every", "checkpoint_keep", "early_stopping"),
)
_RATE = " The learning rate is the optimizer's: optimizer=lambda p: torch.optim.Adam(p, lr=1e-3)."
_HINTS = {  # what other libraries call it
    **dict.fromkeys(("lr", "learning_rate"), _RATE),
    **dict.fromkeys(("val_split", "validation_split", "validation_data", "val_data"), question("validation")),
    **{name: question(own) for name, own in ELSEWHERE.items()},
}


def setting(doc: str, default: Any = MISSING) -> Any:
    """A dataclass field whose `doc` is also the documentation of the Spark ML Param."""
    return field(metadata={"doc": doc}) if default is MISSING else field(default=default, metadata={"doc": doc})


@dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """Stop when `monitor` has not improved for `patience` epochs. Every rank stops after the same epoch."""

    patience: int = setting("Epochs without an improvement after which training stops.", 3)
    monitor: str | None = setting(
        'The value of the history that counts. None: "validation_loss", or "loss" without validation.', None
    )
    min_delta: float = setting("By how much a value must be better to count as an improvement.", 0.0)
    mode: Literal["min", "max"] = setting('Whether smaller ("min") or larger ("max") values are better.', "min")
    restore_best: bool = setting("Whether the model gets the weights of its best epoch, or of its last.", True)

    def __post_init__(self) -> None:
        wrong = []
        object.__setattr__(self, "patience", as_int(self.patience))
        if not whole(self.patience, 1):
            wrong.append(f"patience={self.patience!r} must be a whole number of at least 1.")
        if self.mode not in ("min", "max"):
            wrong.append(f"mode={self.mode!r} is unknown; choose 'min' or 'max'.")
        if wrong:
            raise BadSetting("EarlyStopping: " + " ".join(wrong), settings=wrong)

    def better(self, value: float, best: float | None) -> bool:
        """Whether `value` improves on `best` (None: there is none yet). NaN never does, and all else does on NaN."""
        if math.isnan(value):
            return False
        if best is None or math.isnan(best):
            return True
        return value < best - self.min_delta if self.mode == "min" else value > best + self.min_delta


@dataclass(frozen=True, kw_only=True)
class TorchSettings:
    """What and how to train with PyTorch: every field is also a Spark ML Param of `TorchEstimator`."""

    model: Any = setting(
        "A torch.nn.Module, or a function without arguments that makes one. A function is called in every rank "
        "after torch.manual_seed(seed), and all ranks start from the weights of rank 0."
    )
    optimizer: Any = setting(
        "A function of the module's parameters: lambda p: torch.optim.Adam(p, lr=1e-3). "
        "The learning rate is never scaled with the number of ranks."
    )
    feature_cols: Any = setting(
        "What the module is called with. A list of scalar columns: one float32 tensor [batch, n]. The name of "
        "one vector, array or scalar column: that column, floats as float32, integers as int64. A mapping from "
        "names to either of these: several tensors, passed by keyword."
    )
    label_cols: Any = setting(
        "Floating columns: a float32 label [batch, n]. One integer column: class indices, int64 [batch]; for "
        "classification with a score per class also one floating column of whole numbers, as "
        "StringIndexer makes it."
    )
    loss: Any = setting(
        "A function (output, label) -> mean over the rows of the batch: torch.nn.MSELoss(), "
        "torch.nn.functional.cross_entropy, your own. Not needed with train_step.",
        None,
    )
    nulls: Mapping[str, float] | None = setting(
        'Column -> the number in place of a null in it, in training and prediction: {"age": 0}. A null in any other '
        "column is an error.",
        None,
    )
    nan: Literal["error", "keep"] = setting(
        'Whether a NaN in a floating column is an error, or handed to the module as it is ("keep"), in training and '
        "prediction.",
        "error",
    )
    pad: Mapping[str, Any] | None = setting(
        'Array column -> the length that its rows are filled up to, with zeros: {"tokens": 128}, or with another '
        'number: {"tokens": (128, -1)}. Without, all rows must have one length.',
        None,
    )
    weight_col: str | None = setting(
        "A column of weights. They multiply the per-row losses, and the mean stays over rows (as in Keras). "
        'The loss must offer reduction="none".',
        None,
    )
    task: Literal["auto", "regression", "classification"] | None = setting(
        'What predictions are: "regression" (a double for one output, else an array), "classification" (a class '
        'index, with "probability" beside it), or None (arrays). "auto": "classification" for one label column with '
        "torch's CrossEntropyLoss or NLLLoss, for one of integers or booleans with BCEWithLogitsLoss or BCELoss, and "
        'for their functions; else "regression".',
        "auto",
    )
    batch_size: int | None = setting(
        f"Rows per rank in a batch. None: {DEFAULT_BATCH_SIZE}, or what global_batch_size says.", None
    )
    global_batch_size: int | None = setting(
        "Rows of one optimizer step over all ranks and accumulated batches: "
        "batch_size x ranks x gradient_accumulation.",
        None,
    )
    epochs: int = setting("How often every row is seen.", 1)
    validation: Any = setting(
        "Rows to validate on after each epoch: a fraction (chosen by a hash of the row and the seed), the name of "
        "a boolean column (True: validate), or a DataFrame.",
        None,
    )
    seed: int = setting("Decides initial weights, the order of rows and the validation fraction.", 0)
    remainder: Literal["pad", "drop", "repeat"] = setting(
        'When rows do not divide evenly: "pad" (every row exactly once an epoch, with the mean that one process '
        'would compute), "drop" or "repeat".',
        "pad",
    )
    shuffle: Literal["full", "stream"] | bool = setting(
        'The order of rows: "full" (a new permutation each epoch), "stream" (the first epoch begins while Spark '
        "is still sending, shuffled in windows), False (by row id).",
        "full",
    )
    row_key: Any = setting(
        "Columns that identify a row. Rows are sorted by them within their partitions, so that an epoch which is "
        "resumed after a loss goes on exactly, also when Spark computes a join or an aggregation again.",
        None,
    )
    gradient_accumulation: int = setting("Batches whose gradients make one optimizer step.", 1)
    clip_grad_norm: float | None = setting("The largest L2 norm that all gradients together may have; None: any.", None)
    precision: Literal["fp32", "bf16"] = setting(
        'What forward and loss compute in: "fp32", or "bf16" (autocast; weights stay float32).', "fp32"
    )
    lr_scheduler: Any = setting(
        "A function of the optimizer that makes a scheduler, which is stepped after each epoch "
        "(ReduceLROnPlateau with the validation loss, or else the loss). A function of two arguments (optimizer, "
        "steps) is also given the number of optimizer steps of the whole training, and stepped after each of them.",
        None,
    )
    callbacks: Sequence[Any] = setting("Objects with the methods of tritium.ml.Callback, called in every rank.", ())
    metrics: Any = setting(
        "Name -> a torchmetrics Metric (synchronised over ranks by torchmetrics), or a function (output, label) "
        "-> mean over the rows of the batch (averaged over all rows of all ranks). A list takes the names of the "
        "functions and classes, a MetricCollection its own.",
        (),
    )
    checkpoint_every: Any = setting(
        "How often the training is saved to the run directory, from which a retry, or a later fit with the same "
        'run_dir, goes on: a time ("1min"), a number of optimizer steps, or None: never.',
        "1min",
    )
    checkpoint_keep: int = setting("How many checkpoints are kept.", 2)
    if_data_changed: Literal["refuse", "anew"] = setting(
        "When a training goes on over other rows than it was begun with: "
        '"refuse", or begin the epoch "anew" with the rows of now.',
        "refuse",
    )
    if_code_changed: Literal["refuse", "continue"] = setting(
        "When a training goes on with another model, loss, train_step, scheduler or metric than it was begun with: "
        '"refuse", or "continue" with the code of now.',
        "refuse",
    )
    early_stopping: Any = setting("EarlyStopping(...), or its patience in epochs.", None)
    train_step: Any = setting(
        "Your own step: a function (module, batch) -> loss, or (loss, output) if there are metrics. The module is your "
        "own, so its methods can be called, and any of its parameters may be left out. The loss is "
        "the mean over the batch's rows; the batch is a mapping of tensors. It runs for validation too, in eval "
        "mode and without gradients.",
        None,
    )
    verbose: bool = setting("Whether steps and losses are shown while training.", True)

    def __post_init__(self) -> None:
        from tritium.ml.checks import wrong_settings

        for name in _WHOLE:
            object.__setattr__(self, name, as_int(getattr(self, name)))
        wrong = list(wrong_settings(self))
        if wrong:
            raise BadSetting(" ".join(wrong), settings=wrong)

    @classmethod
    def fields(cls) -> tuple[str, ...]:
        """The names of the settings, in order."""
        return tuple(f.name for f in fields(cls))

    def make_module(self) -> Any:
        """A module of our own: the function's, or a copy of the one that was given.

        Every call of the function draws the same random numbers, so that what is in no state_dict (random features, a
        buffer that is not persistent) is the same in all ranks, on the driver, and in the model that is loaded.
        """
        import torch

        from tritium.model.engines.torch_module import seeded

        if isinstance(self.model, torch.nn.Module):
            return copy.deepcopy(self.model)
        with seeded(self.seed):
            made = self.model()
        if not isinstance(made, torch.nn.Module):
            raise BadSetting(f"model={name_of(self.model)} returned a {type(made).__name__}, not a torch.nn.Module.")
        return made

    def rows_per_rank(self, ranks: int) -> int:
        """The batch size of one rank; BadSetting when `global_batch_size` can't be shared out evenly."""
        if self.global_batch_size is None:
            return self.batch_size or DEFAULT_BATCH_SIZE
        share = ranks * self.gradient_accumulation
        if self.global_batch_size % share:
            below = self.global_batch_size - self.global_batch_size % share
            near = f"{below} or {below + share}" if below else str(share)
            raise BadSetting(
                f"global_batch_size={self.global_batch_size} is not a multiple of ranks x gradient_accumulation "
                f"= {ranks} x {self.gradient_accumulation} = {share}. Use {near}."
            )
        return self.global_batch_size // share

    def order(self) -> dict[str, Any]:
        """What decides the order of the rows: keywords of `Shard.epochs`."""
        return {
            "shuffle": self.shuffle,
            "seed": self.seed,
            "remainder": self.remainder,
            "if_changed": self.if_data_changed,
        }

    def inputs(self) -> dict[str, str | list[str]]:
        """Batch column → source columns, of the features alone."""
        if isinstance(self.feature_cols, Mapping):
            return {k: v if isinstance(v, str) else list(v) for k, v in self.feature_cols.items()}
        return {FEATURES: self.feature_cols if isinstance(self.feature_cols, str) else list(self.feature_cols)}

    def labels(self) -> list[str]:
        """The label columns."""
        return [self.label_cols] if isinstance(self.label_cols, str) else list(self.label_cols)

    def make_optimizer(self, module: Any) -> Any:
        """The optimizer of a module's parameters. BadSetting when `optimizer` gives something else."""
        made = self.optimizer(module.parameters())
        if not hasattr(made, "param_groups") or not hasattr(made, "step"):
            raise BadSetting(
                f"optimizer={name_of(self.optimizer)} returned a {type(made).__name__}, and must return one "
                "torch.optim.Optimizer. A scheduler goes into lr_scheduler=.",
                setting="optimizer",
            )
        if needed := needed_arguments(made.step):
            raise BadSetting(
                f"optimizer={name_of(self.optimizer)} makes a {type(made).__name__}, whose step can't be taken: its "
                f"step needs {', '.join(needed)}, and is called without after each batch. Take one that steps by the "
                "gradients alone, such as torch.optim.Adam.",
                setting="optimizer",
            )
        return made

    def make_scheduler(self, optimizer: Any, *steps: int) -> Any:
        """The scheduler of an optimizer. BadSetting when `lr_scheduler` gives something else."""
        import torch

        made = self.lr_scheduler(optimizer, *steps)
        kind = type(made).__name__
        if not hasattr(made, "step") or not hasattr(made, "state_dict"):
            raise BadSetting(
                f"lr_scheduler={name_of(self.lr_scheduler)} returned a {kind}, and must return one scheduler of "
                "torch.optim.lr_scheduler. Several become one by SequentialLR or ChainedScheduler.",
                setting="lr_scheduler",
            )
        is_plateau = isinstance(made, torch.optim.lr_scheduler.ReduceLROnPlateau)
        if (needed := needed_arguments(made.step)) and (steps or not is_plateau):
            fix = (
                f"Step it after each epoch, with the loss: lr_scheduler=lambda optimizer: {kind}(optimizer)"
                if is_plateau
                else "Give one that is stepped without"
            )
            raise BadSetting(
                f"lr_scheduler={name_of(self.lr_scheduler)} makes a {kind} that is stepped after each "
                f"{'optimizer step' if steps else 'epoch'}, and its step needs {', '.join(needed)}. {fix}.",
                setting="lr_scheduler",
            )
        return made

    def has_metrics(self) -> bool:
        """Whether `metrics` is of a kind that metrics are taken from."""
        given = self.metrics
        return (isinstance(given, Mapping | Sequence) and not isinstance(given, str)) or _is_collection(given)

    def named_metrics(self) -> dict[str, Any]:
        """Metrics by name; those of a MetricCollection are told apart, by its names for them."""
        return dict(self.metric_pairs())

    def metric_pairs(self) -> list[tuple[str, Any]]:
        """`named_metrics` as pairs, of which two may have the same name."""
        given = [self.metrics] if _is_collection(self.metrics) else self.metrics
        pairs = given.items() if isinstance(given, Mapping) else [(metric_name(metric), metric) for metric in given]
        return [
            one
            for name, metric in pairs
            for one in (metric.items(keep_base=False) if _is_collection(metric) else [(name, metric)])
        ]

    def stopping(self) -> EarlyStopping | None:
        """`early_stopping` as an object."""
        if isinstance(self.early_stopping, int):
            return EarlyStopping(patience=self.early_stopping)
        return self.early_stopping  # type: ignore[no-any-return]

    def scheduler_per_step(self) -> bool:
        """Whether `lr_scheduler` takes (optimizer, steps), and so is stepped after each optimizer step."""
        return self.lr_scheduler is not None and len(needed_arguments(self.lr_scheduler)) == 2


def no_setting(names: Sequence[str]) -> BadSetting:
    """The error for settings that neither TorchSettings nor Gang has, each with what is probably meant."""
    known = (*TorchSettings.fields(), *Gang.fields())
    said = (f"There is no setting {name!r}.{_HINTS.get(name) or suggest(name, known)}" for name in names)
    return BadSetting(" ".join(said), settings=list(names))


def whole(value: Any, least: int) -> bool:
    """Whether `value` is a whole number of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def name_of(thing: Any) -> str:
    """A function's name, or an object's class."""
    return str(getattr(thing, "__name__", type(thing).__name__))


def is_by_class(loss: Any) -> bool:
    """Whether it is torch's own loss of class indices against a score for each class."""
    loss = loss.func if isinstance(loss, functools.partial) else loss
    home = loss.__module__ if inspect.isfunction(loss) else type(loss).__module__
    by_class = ("CrossEntropyLoss", "NLLLoss", "cross_entropy", "nll_loss", "MultiMarginLoss", "multi_margin_loss")
    return home.startswith("torch.") and name_of(loss) in by_class


def is_of_one_score(loss: Any) -> bool:
    """Whether it is torch's own loss of one score a row against 0 or 1."""
    return name_of(loss) in _ONE_SCORE


def _is_collection(metrics: Any) -> bool:
    """Whether it is a torchmetrics MetricCollection, which is a module that holds others by name."""
    return hasattr(metrics, "compute_groups") and hasattr(metrics, "items")


def metric_name(metric: Any) -> str:
    """MeanAbsoluteError() → mean_absolute_error."""
    name = name_of(metric)
    starts = [i and c.isupper() and not name[i - 1].isupper() for i, c in enumerate(name)]
    return "".join(f"_{c}" if start else c for c, start in zip(name, starts, strict=True)).lower()


def needed_arguments(function: Callable[..., Any], *kinds: inspect._ParameterKind) -> list[str]:
    """The arguments without a default that a function takes by position, or in these other ways."""
    kinds = kinds or (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in _parameters(function) or () if p.default is p.empty and p.kind in kinds]


def argument_names(function: Callable[..., Any]) -> list[str]:
    """All arguments of a function; none where they can't be known."""
    return [p.name for p in _parameters(function) or ()]


def takes(function: Callable[..., Any], count: int) -> bool:
    """Whether it can be called with so many arguments by position. True where that can't be known."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some builtins have no signature
        return True
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


def takes_nothing(function: Callable[..., Any]) -> bool:
    """Whether it can't be given a single argument by position."""
    parameters = _parameters(function)
    return parameters is not None and all(p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in parameters)


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some builtins have no signature
        return None
