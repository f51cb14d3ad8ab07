"""The settings of estimators of all frameworks, each written once (any process)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal

from tritium.errors import BadSetting
from tritium.gang.rank.checkpoints import every_of
from tritium.gang.settings import ELSEWHERE, Gang, as_int
from tritium.hints import did_you_mean, question, suggest
from tritium.ml.arguments import argument_names, name_of, takes
from tritium.ml.early_stopping import EarlyStopping
from tritium.ml.fields import is_names, is_number, is_whole, setting

FEATURES, LABEL, WEIGHT = "features", "label", "weight"
DEFAULT_BATCH_SIZE = 32
_WHOLE = (
    *("batch_size", "global_batch_size", "epochs", "gradient_accumulation", "seed"),
    *("checkpoint_every", "checkpoint_keep", "early_stopping"),
)
_CALLBACK = ("on_train_start", "on_epoch_end", "on_train_end")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings that estimators of all frameworks share; the dataclass of a framework adds its own.

    Every field is also a Spark ML Param of the estimator.
    """

    framework: ClassVar[str] = ""
    """The `framework` of the gang."""
    choices: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "task": ("auto", "regression", "classification", None),
        "remainder": ("pad", "drop", "repeat"),
        "shuffle": ("full", "stream", False, True),
        "nan": ("error", "keep"),
        "if_data_changed": ("refuse", "restart"),
        "if_code_changed": ("refuse", "continue"),
        "verbose": (True, False),
    }
    """Setting → the values it may have."""
    hints: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("val_split", "validation_split", "validation_data", "val_data"), question("validation")),
        **{name: question(own) for name, own in ELSEWHERE.items()},
    }
    """The name of a setting in other libraries → advice."""
    loss_of_numbers: ClassVar[str] = "the mean squared error"
    """How the framework writes a loss for a number to predict, for the advice in an error."""

    feature_cols: Any = setting(
        "What the model is called with. A list of scalar columns: one float32 tensor [batch, n]. The name of "
        "one vector, array or scalar column: that column, floats as float32, integers as int64. A mapping from "
        "names to either of these: several tensors, passed by keyword."
    )
    label_cols: Any = setting(
        "Floating columns: a float32 label [batch, n]. One integer column: class indices, int64 [batch]; for "
        "classification with a score per class also one floating column of whole numbers, as "
        "StringIndexer makes it."
    )
    nulls: Mapping[str, float] | None = setting(
        'Column -> the number in place of a null in it, in training and prediction: {"age": 0}. A null in any other '
        "column is an error.",
        None,
    )
    nan: Literal["error", "keep"] = setting(
        'Whether a NaN in a floating column is an error, or handed to the model as it is ("keep"), in training and '
        "prediction.",
        "error",
    )
    pad: Mapping[str, Any] | None = setting(
        'Array column -> the length that its rows are filled up to, with zeros: {"tokens": 128}, or with another '
        'number: {"tokens": (128, -1)}. Without, all rows must have one length.',
        None,
    )
    weight_col: str | None = setting(
        "A column of weights. They multiply the per-row losses, and the mean stays over rows (as in Keras).", None
    )
    task: Literal["auto", "regression", "classification"] | None = setting(
        'What predictions are: "regression" (a double for one output, else an array), "classification" (a class '
        'index, with "probability" beside it), or None (arrays). "auto": what loss and label columns suggest.',
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
    epochs: int = setting("How many times every row is seen.", 1)
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
        "resumed after a loss continues exactly, also when Spark computes a join or an aggregation again.",
        None,
    )
    gradient_accumulation: int = setting("Batches whose gradients make one optimizer step.", 1)
    early_stopping: Any = setting("EarlyStopping(...), or its patience in epochs.", None)
    callbacks: Sequence[Any] = setting("Objects with the methods of tritium.ml.Callback, called in every rank.", ())
    checkpoint_every: Any = setting(
        "How often the training is saved to the run directory, from which a retry, or a later fit with the same "
        'run_dir, continues: a time ("1min"), a number of optimizer steps, or None: never.',
        "1min",
    )
    checkpoint_keep: int = setting("How many checkpoints are kept.", 2)
    if_data_changed: Literal["refuse", "restart"] = setting(
        "When a training continues over other rows than it was begun with: "
        '"refuse", or "restart" the epoch on the current rows.',
        "refuse",
    )
    if_code_changed: Literal["refuse", "continue"] = setting(
        "When a training continues with another model, loss, train_step, scheduler or metric than it was begun with: "
        '"refuse", or "continue" with the current code.',
        "refuse",
    )
    verbose: bool = setting("Whether steps and losses are shown while training.", True)

    def __post_init__(self) -> None:
        for name in _WHOLE:
            object.__setattr__(self, name, as_int(getattr(self, name)))
        wrong = list(self.problems())
        if wrong:
            raise BadSetting(" ".join(wrong), settings=wrong)

    def problems(self) -> Iterator[str]:
        """Yield one sentence for each thing that is wrong. A framework adds those of its own settings."""
        yield from _columns(self)
        yield from _callbacks(self.callbacks)
        yield from _numbers(self)
        yield from _choices(self)
        yield from _early_stopping(self)

    @classmethod
    def fields(cls) -> tuple[str, ...]:
        """Return the names of the settings, the framework's own first."""
        shared = Settings.__dataclass_fields__
        return tuple(sorted((f.name for f in fields(cls)), key=lambda name: name in shared))

    @classmethod
    def no_setting(cls, names: Sequence[str]) -> BadSetting:
        """Return the error for settings that neither this class nor Gang has, each with what is probably meant."""
        known = (*cls.fields(), *Gang.fields())
        said = (f"There is no setting {name!r}.{cls.hints.get(name) or suggest(name, known)}" for name in names)
        return BadSetting(" ".join(said), settings=list(names))

    def rows_per_rank(self, ranks: int) -> int:
        """Return the batch size of one rank. Raises BadSetting when `global_batch_size` can't be divided evenly."""
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
        """Return the keywords of `Shard.epochs` that decide the order of the rows."""
        return {
            "shuffle": self.shuffle,
            "seed": self.seed,
            "remainder": self.remainder,
            "if_changed": self.if_data_changed,
        }

    def inputs(self) -> dict[str, str | list[str]]:
        """Return batch column → source columns, of the features alone."""
        if isinstance(self.feature_cols, Mapping):
            return {k: v if isinstance(v, str) else list(v) for k, v in self.feature_cols.items()}
        return {FEATURES: self.feature_cols if isinstance(self.feature_cols, str) else list(self.feature_cols)}

    def labels(self) -> list[str]:
        """Return the label columns."""
        return [self.label_cols] if isinstance(self.label_cols, str) else list(self.label_cols)

    def stopping_rule(self) -> EarlyStopping | None:
        """Return `early_stopping` as an object whose `monitor` is set, or None."""
        rule = self.early_stopping
        rule = EarlyStopping(patience=rule) if isinstance(rule, int) else rule
        if rule is None or rule.monitor is not None:
            return rule
        return replace(rule, monitor="validation_loss" if self.validation is not None else "loss")

    # ---- what a framework overrides for its own settings

    def metric_names(self) -> Sequence[str]:
        """Return the names that metrics have in the history."""
        return ()

    def is_of_one_score(self) -> bool:
        """Return whether the loss compares one score a row with 0 or 1."""
        return False

    def is_by_class(self) -> bool:
        """Return whether the loss compares a score for each class with a class index."""
        return False

    def gives_probabilities(self) -> bool:
        """Return whether the loss takes probabilities, so that the model's outputs are probabilities, not scores."""
        return False

    def has_own_step(self) -> bool:
        """Return whether the user's code computes the loss, so that nothing is known of it."""
        return False


def _columns(settings: Settings) -> Iterator[str]:
    features = settings.feature_cols
    for name, given in (("feature_cols", features), ("label_cols", settings.label_cols)):
        several = isinstance(given, Mapping) and name == "feature_cols"
        values = list(given.values()) if several else [given]
        if not values or not all(is_names(value) for value in values):
            allowed = ", or a mapping from names to these" * (name == "feature_cols")
            yield f"{name}={given!r} must be a column, or a list of columns{allowed}."
    for taken in sorted({LABEL, WEIGHT} & set(features)) if isinstance(features, Mapping) else ():
        yield f"feature_cols names an input {taken!r}, as a batch calls another column; choose another name."
    nulls = {} if settings.nulls is None else settings.nulls
    if not isinstance(nulls, Mapping) or not all(isinstance(k, str) and is_number(v) for k, v in nulls.items()):
        yield f"nulls={nulls!r} must be a mapping from columns to numbers (a mask needs tr.launch and tr.Data)."
    if settings.pad is not None and not isinstance(settings.pad, Mapping):
        yield f"pad={settings.pad!r} must be a mapping from array columns to lengths, or to (length, number)."
    if settings.weight_col is not None and not isinstance(settings.weight_col, str):
        yield f"weight_col={settings.weight_col!r} must be the name of one column."


def _callbacks(given: Any) -> Iterator[str]:
    if not isinstance(given, list | tuple):
        shown = name_of(given) if isinstance(given, type) else f"{type(given).__name__}(…)"
        yield f"callbacks={shown} must be a list: callbacks=[…]."
        return
    for callback in given:
        if isinstance(callback, type):
            yield f"the callback {name_of(callback)} is a class; give an instance, {name_of(callback)}()."
        elif missing := [method for method in _CALLBACK if not hasattr(callback, method)]:
            yield f"the callback {callback!r} has no {', '.join(missing)}; derive it from tritium.ml.Callback."
        else:
            for method in _CALLBACK:
                if not takes(getattr(callback, method), 1):
                    arguments = ", ".join(argument_names(getattr(callback, method))) or "nothing"
                    yield f"{method} of the callback {callback!r} takes {arguments}; it is called with (state)."


def _numbers(settings: Settings) -> Iterator[str]:
    for name in ("batch_size", "global_batch_size", "epochs", "gradient_accumulation", "checkpoint_keep"):
        value = getattr(settings, name)
        if not is_whole(value, 1) and not (value is None and name.endswith("batch_size")):
            yield f"{name}={value!r} must be a whole number of at least 1."
    if settings.batch_size is not None and settings.global_batch_size is not None:
        yield (
            f"batch_size={settings.batch_size!r} (per rank) and global_batch_size={settings.global_batch_size!r} "
            f"(all ranks) contradict each other; give one."
        )
    if not is_whole(settings.seed, 0):
        yield f"seed={settings.seed!r} must be a whole number of at least 0."
    try:
        every_of(settings.checkpoint_every)
    except (BadSetting, TypeError):
        yield (
            f'checkpoint_every={settings.checkpoint_every!r} must be a time ("30s", "5min", "2h"), a float in seconds '
            "(30.0), a number of optimizer steps (100), or None: never."
        )
    part = settings.validation
    if isinstance(part, bool | int | float) and not (is_number(part) and 0 < part < 1):
        yield f"validation={part!r} must be a fraction between 0 and 1, a boolean column, or a DataFrame."


def _choices(settings: Settings) -> Iterator[str]:
    for name, choices in settings.choices.items():
        value = getattr(settings, name)
        if not any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
            hint = did_you_mean(str(value), [c for c in choices if isinstance(c, str)])
            yield f"{name}={value!r} is unknown; choose one of {', '.join(map(repr, choices))}.{hint}"


def _early_stopping(settings: Settings) -> Iterator[str]:
    stopping = settings.early_stopping
    if stopping is not None and not is_whole(stopping, 1) and not isinstance(stopping, EarlyStopping):
        yield f"early_stopping={stopping!r} must be a number of epochs of at least 1, or EarlyStopping(...)."
    if isinstance(stopping, EarlyStopping) and stopping.monitor is not None:
        known = ["loss", *settings.metric_names()]
        known += [f"validation_{name}" for name in known] if settings.validation is not None else []
        if stopping.monitor not in known:
            yield f"early_stopping monitors {stopping.monitor!r}; the history will have {', '.join(known)}."
