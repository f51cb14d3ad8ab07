"""The settings of estimators that train in iterations or epochs, and continue from checkpoints (any process)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from tritium.accelerators import GPU
from tritium.arguments import argument_names, name_of, takes
from tritium.checkpoint.checkpoints import every_of
from tritium.errors import BadSetting, EmptyShard
from tritium.gang.settings import Gang
from tritium.ml.early_stopping import EarlyStopping
from tritium.ml.fields import is_whole, setting
from tritium.ml.settings import Settings

DEFAULT_BATCH_SIZE = 32
_CALLBACK = ("on_train_start", "on_epoch_end", "on_train_end")
_AT_STEPS = ("on_step_end",)  # A callback need not have it.


@dataclass(frozen=True, kw_only=True)
class IterativeSettings(Settings):
    """The settings of a training that can stop early, and that a retry or a later fit continues."""

    choices: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **Settings.choices,
        "if_data_changed": ("refuse", "restart"),
        "if_code_changed": ("refuse", "continue"),
    }
    whole: ClassVar[tuple[str, ...]] = (*Settings.whole, "checkpoint_every", "checkpoint_keep", "early_stopping")
    loss_names: ClassVar[tuple[str, ...]] = ("loss",)
    """Values of the history, beside metrics, that can be monitored."""

    unit: ClassVar[str] = "epoch"
    """What a training is a number of."""

    early_stopping: Any = setting("EarlyStopping(...), or its patience in epochs.", None, resume="any")
    checkpoint_every: Any = setting(
        "How often the training is saved to the run directory, from which a retry, or a later fit with the same "
        'run_dir, continues: a time ("1min"), a number of optimizer steps, or None: never.',
        "1min",
        resume="any",
    )
    checkpoint_keep: int = setting("How many checkpoints are kept.", 2, resume="any")
    if_data_changed: Literal["refuse", "restart"] = setting(
        "When a training continues over other rows than it was begun with: "
        '"refuse", or "restart" the epoch on the current rows.',
        "refuse",
        resume="any",
    )
    if_code_changed: Literal["refuse", "continue"] = setting(
        "When a training continues with another model, loss, train_step, scheduler or metric than it was begun with: "
        '"refuse", or "continue" with the current code.',
        "refuse",
        resume="any",
    )

    def problems(self) -> Iterator[str]:
        """Yield one sentence for each thing that is wrong."""
        yield from super().problems()
        yield from _checkpoints(self)
        yield from _early_stopping(self)

    @property
    def keeps_checkpoints(self) -> bool:
        """Whether checkpoints are written also where the user has named no run directory."""
        return self.checkpoint_every is not None

    @property
    @abstractmethod
    def rounds(self) -> int:
        """How many epochs or iterations a training has."""

    def history_names(self) -> Sequence[str] | None:
        """Return the names of loss and metrics in the history; None where they are not known yet."""
        return [*self.loss_names, *self.metric_names()]

    def stopping_rule(self) -> EarlyStopping | None:
        """Return `early_stopping` as an object whose `monitor` is set, or None."""
        rule = self.early_stopping
        rule = EarlyStopping(patience=rule) if isinstance(rule, int) else rule
        if rule is None or rule.monitor is not None:
            return rule
        return replace(rule, monitor="validation_loss" if self.validation is not None else "loss")

    def stopping_rule_after(self, state: Mapping[str, Any]) -> EarlyStopping | None:
        """Return the current rule of a training that has left this state of early stopping in a checkpoint."""
        return self.stopping_rule()


@dataclass(frozen=True, kw_only=True)
class EpochSettings(IterativeSettings):
    """The settings of a training in epochs, each of all rows in batches of a number of rows per rank."""

    choices: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **IterativeSettings.choices,
        "remainder": ("pad", "drop", "repeat"),
        "shuffle": ("full", "stream", False, True),
    }
    whole: ClassVar[tuple[str, ...]] = (*IterativeSettings.whole, "batch_size", "global_batch_size", "epochs")

    batch_size: int | None = setting(
        f"Rows per rank in a batch. None: {DEFAULT_BATCH_SIZE}, or what global_batch_size says.", None, resume="same"
    )
    global_batch_size: int | None = setting(
        "Rows of one optimizer step over all ranks and accumulated batches: "
        "batch_size x ranks x gradient_accumulation.",
        None,
        resume="same",
    )
    epochs: int = setting("How many times every row is seen.", 1, resume="any")
    remainder: Literal["pad", "drop", "repeat"] = setting(
        'When rows do not divide evenly: "pad" (every row exactly once an epoch, with the mean that one process '
        'would compute), "drop" or "repeat".',
        "pad",
        resume="same",
    )
    shuffle: Literal["full", "stream"] | bool = setting(
        'The order of rows: "full" (a new permutation each epoch), "stream" (the first epoch begins while Spark '
        "is still sending, shuffled in windows), False (by row id).",
        "full",
        resume="same",
    )

    def problems(self) -> Iterator[str]:
        """Yield one sentence for each thing that is wrong."""
        yield from super().problems()
        yield from _numbers(self)

    def check_gang(self, gang: Gang) -> None:
        """Raise BadSetting when a gang can't train with these settings."""
        super().check_gang(gang)
        if gang.gpus and gang.accelerator != GPU:
            raise BadSetting(
                f"accelerator={gang.accelerator!r}: this estimator trains on GPUs or CPUs. tr.launch and "
                "FunctionEstimator call your own function, on any device.",
                setting="accelerator",
            )
        if gang.most > 1 and 0 < gang.gpus < 1:
            raise BadSetting(
                f"gpus={gang.gpus:g}: ranks that share a GPU can't exchange gradients, as NCCL refuses two on one. Ask "
                "for gpus=1, or ranks=1.",
                setting="gpus",
            )

    @property
    def rounds(self) -> int:
        """How many epochs a training has."""
        return self.epochs

    @property
    def exchange_order(self) -> Any:
        """What the exchange prepares: the `shuffle` of `tr.Data`."""
        return self.shuffle

    def batches_per_step(self) -> int:
        """Return how many batches of a rank make one optimizer step."""
        return 1

    def check_ranks(self, ranks: int) -> None:
        """Raise BadSetting when `global_batch_size` can't be divided among this many ranks."""
        self.rows_per_rank(ranks)

    def check_validation_rows(self, counts: Sequence[int]) -> None:
        """Raise EmptyShard where there are no rows to validate on, with the same text on every rank.

        counts : rows to validate on, by rank.
        """
        if not any(counts):
            fix = "Give a larger fraction" if isinstance(self.validation, float) else "Look at what it holds"
            raise EmptyShard(
                f"There are no rows to validate on: validation={self.validation!r} gives none (rows per rank: "
                f"{', '.join(map(str, counts[:64]))}). {fix}, or validation=None.",
                counts=list(counts),
            )

    def rows_per_rank(self, ranks: int) -> int:
        """Return the batch size of one rank. Raises BadSetting when `global_batch_size` can't be divided evenly."""
        if self.global_batch_size is None:
            return self.batch_size or DEFAULT_BATCH_SIZE
        share = ranks * self.batches_per_step()
        if self.global_batch_size % share:
            below = self.global_batch_size - self.global_batch_size % share
            near = f"{below} or {below + share}" if below else str(share)
            raise BadSetting(
                f"global_batch_size={self.global_batch_size} is not a multiple of ranks x gradient_accumulation "
                f"= {ranks} x {self.batches_per_step()} = {share}. Use {near}."
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


def _numbers(settings: EpochSettings) -> Iterator[str]:
    for name in ("batch_size", "global_batch_size", "epochs"):
        value = getattr(settings, name)
        if not is_whole(value, 1) and not (value is None and name.endswith("batch_size")):
            yield f"{name}={value!r} must be a whole number of at least 1."
    if settings.batch_size is not None and settings.global_batch_size is not None:
        yield (
            f"batch_size={settings.batch_size!r} (per rank) and global_batch_size={settings.global_batch_size!r} "
            f"(all ranks) contradict each other; give one."
        )


def _checkpoints(settings: IterativeSettings) -> Iterator[str]:
    if not is_whole(settings.checkpoint_keep, 1):
        yield f"checkpoint_keep={settings.checkpoint_keep!r} must be a whole number of at least 1."
    try:
        every_of(settings.checkpoint_every)
    except (BadSetting, TypeError):
        yield (
            f'checkpoint_every={settings.checkpoint_every!r} must be a time ("30s", "5min", "2h"), a float in seconds '
            "(30.0), a number of optimizer steps (100), or None: never."
        )


def _early_stopping(settings: IterativeSettings) -> Iterator[str]:
    stopping = settings.early_stopping
    if stopping is not None and not is_whole(stopping, 1) and not isinstance(stopping, EarlyStopping):
        yield f"early_stopping={stopping!r} must be a number of epochs of at least 1, or EarlyStopping(...)."
    if isinstance(stopping, EarlyStopping) and stopping.monitor is not None:
        known = settings.history_names()
        if known is None:
            return
        known = [*known]
        known += [f"validation_{name}" for name in known] if settings.validation is not None else []
        if stopping.monitor not in known:
            yield f"early_stopping monitors {stopping.monitor!r}; the history will have {', '.join(known)}."


def callback_problems(given: Any) -> Iterator[str]:
    """Yield what is wrong with a list of objects like `tritium.ml.Callback`."""
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
            for method in (*_CALLBACK, *_AT_STEPS):
                if hasattr(callback, method) and not takes(getattr(callback, method), 1):
                    arguments = ", ".join(argument_names(getattr(callback, method))) or "nothing"
                    yield f"{method} of the callback {callback!r} takes {arguments}; it is called with (state)."
