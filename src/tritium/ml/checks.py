"""Everything that is wrong with the settings themselves, all at once (any process)."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from typing import Any

from tritium.errors import BadSetting
from tritium.gang.rank.checkpoints import every_of
from tritium.hints import did_you_mean
from tritium.ml.settings import (
    LABEL,
    WEIGHT,
    EarlyStopping,
    TorchSettings,
    argument_names,
    name_of,
    needed_arguments,
    takes,
    takes_nothing,
    whole,
)

_HISTORY = ("epoch", "loss", "seconds", "rows", "rows_per_second", "rows_padded", "learning_rate")
_CALLBACK = ("on_train_start", "on_epoch_end", "on_train_end")
_OPTIMIZER = " Give a function of the parameters: lambda p: torch.optim.Adam(p)."
_HINTS = {"optimizer": _OPTIMIZER, "loss": " Give an instance or a function: torch.nn.MSELoss()."}
_CHOICES: dict[str, tuple[Any, ...]] = {
    "task": ("auto", "regression", "classification", None),
    "remainder": ("pad", "drop", "repeat"),
    "shuffle": ("full", "stream", False, True),
    "nan": ("error", "keep"),
    "precision": ("fp32", "bf16"),
    "if_data_changed": ("refuse", "anew"),
    "if_code_changed": ("refuse", "continue"),
    "verbose": (True, False),
}


def wrong_settings(settings: TorchSettings) -> Iterator[str]:
    """One sentence for each thing that is wrong."""
    yield from _columns(settings)
    yield from _functions(settings)
    yield from _metrics(settings)
    yield from _numbers(settings)
    yield from _choices(settings)


def _columns(settings: TorchSettings) -> Iterator[str]:
    features = settings.feature_cols
    for name, given in (("feature_cols", features), ("label_cols", settings.label_cols)):
        several = isinstance(given, Mapping) and name == "feature_cols"
        values = list(given.values()) if several else [given]
        if not values or not all(_is_names(value) for value in values):
            allowed = ", or a mapping from names to these" * (name == "feature_cols")
            yield f"{name}={given!r} must be a column, or a list of columns{allowed}."
    for taken in sorted({LABEL, WEIGHT} & set(features)) if isinstance(features, Mapping) else ():
        yield f"feature_cols names an input {taken!r}, as a batch calls another column; choose another name."
    nulls = {} if settings.nulls is None else settings.nulls
    if not isinstance(nulls, Mapping) or not all(isinstance(k, str) and _number(v) for k, v in nulls.items()):
        yield f"nulls={nulls!r} must be a mapping from columns to numbers (a mask needs tr.launch and tr.Data)."
    if settings.pad is not None and not isinstance(settings.pad, Mapping):
        yield f"pad={settings.pad!r} must be a mapping from array columns to lengths, or to (length, number)."
    if settings.weight_col is not None and not isinstance(settings.weight_col, str):
        yield f"weight_col={settings.weight_col!r} must be the name of one column."
    if settings.weight_col is not None and settings.train_step is not None:
        yield (
            "weight_col can't weight the loss of a train_step. Take the weights there, as an input under a name of its "
            f'own: feature_cols={{"x": […], "w": [{settings.weight_col!r}]}} and batch["w"]. The module then gets x '
            "and w by keyword, and the model needs that column when it predicts."
        )


def _functions(settings: TorchSettings) -> Iterator[str]:
    for name in ("model", "optimizer", "loss", "train_step", "lr_scheduler"):
        value = getattr(settings, name)
        if not callable(value) and (value is not None or name in ("model", "optimizer")):
            shown = f"{type(value).__name__}(…)" if hasattr(value, "param_groups") else repr(value)
            yield f"{name}={shown} is not a function.{_HINTS.get(name, '')}"
    if callable(settings.optimizer) and takes_nothing(settings.optimizer):
        yield f"optimizer={name_of(settings.optimizer)} takes nothing; it is called with the parameters.{_OPTIMIZER}"
    if callable(settings.optimizer) and len(needed := needed_arguments(settings.optimizer)) > 1:
        yield (
            f"optimizer={name_of(settings.optimizer)} needs {', '.join(needed)}; it is called with the module's "
            f"parameters alone.{_OPTIMIZER}"
        )
    if isinstance(settings.model, type) and (needed := needed_arguments(settings.model)):
        yield (
            f"model={name_of(settings.model)} is a class that needs {', '.join(needed)}; "
            f"give an instance, or a function that makes one."
        )
    if settings.loss is None and settings.train_step is None:
        yield "there is no loss. Give loss=, or your own train_step=."
    if isinstance(settings.loss, type):
        yield f"loss={name_of(settings.loss)} is a class; give an instance, {name_of(settings.loss)}()."
    if getattr(settings.loss, "reduction", "mean") == "sum":
        yield 'the loss has reduction="sum", with which N ranks can\'t agree with one. Use reduction="mean".'
    if callable(settings.train_step) and not takes(settings.train_step, 2):
        arguments = ", ".join(argument_names(settings.train_step)) or "nothing"
        yield f"train_step={name_of(settings.train_step)} takes {arguments}; it is called with (module, batch)."
    yield from _scheduler(settings.lr_scheduler)
    yield from _callbacks(settings.callbacks)


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


def _scheduler(given: Any) -> Iterator[str]:
    """By how many arguments it takes; of a class the second one is known only by its name."""
    if not callable(given):
        return
    needed, by_keyword = needed_arguments(given), needed_arguments(given, inspect.Parameter.KEYWORD_ONLY)
    of_class = isinstance(given, type) and needed[1:] not in ([], ["steps"])
    if len(needed) > 2 or by_keyword or of_class:
        yield (
            f"lr_scheduler={name_of(given)} needs {', '.join([*needed, *by_keyword])}; it is called with the "
            f"optimizer, or with (optimizer, steps). Give a lambda with the rest filled in."
        )
    elif takes_nothing(given):
        yield f"lr_scheduler={name_of(given)} takes nothing; it is called with the optimizer, or (optimizer, steps)."


def _metrics(settings: TorchSettings) -> Iterator[str]:
    given = settings.metrics
    if not settings.has_metrics():
        yield f"metrics={given!r} must be a mapping from names to metrics, a list of metrics, or a MetricCollection."
        return
    pairs = settings.metric_pairs()
    for name, metric in pairs:
        if not callable(metric) or isinstance(metric, type):
            yield f"the metric {name!r} is {metric!r}, neither a torchmetrics Metric nor a function of two."
        if name in _HISTORY:
            yield f"a metric is called {name!r}, as the history calls something else; choose another name."
    names = [name for name, _ in pairs]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"two metrics are called {name!r}; give a mapping from names to metrics."


def _numbers(settings: TorchSettings) -> Iterator[str]:
    for name in ("batch_size", "global_batch_size", "epochs", "gradient_accumulation", "checkpoint_keep"):
        value = getattr(settings, name)
        if not whole(value, 1) and not (value is None and name.endswith("batch_size")):
            yield f"{name}={value!r} must be a whole number of at least 1."
    if settings.batch_size is not None and settings.global_batch_size is not None:
        yield (
            f"batch_size={settings.batch_size!r} (per rank) and global_batch_size={settings.global_batch_size!r} "
            f"(all ranks) contradict each other; give one."
        )
    if not whole(settings.seed, 0):
        yield f"seed={settings.seed!r} must be a whole number of at least 0."
    if (clip := settings.clip_grad_norm) is not None and not (_number(clip) and 0 < clip < math.inf):
        yield f"clip_grad_norm={clip!r} must be a number above 0."
    try:
        every_of(settings.checkpoint_every)
    except (BadSetting, TypeError):
        yield (
            f'checkpoint_every={settings.checkpoint_every!r} must be a time ("30s", "5min", "2h"), a float in seconds '
            "(30.0), a number of optimizer steps (100), or None: never."
        )
    stopping = settings.early_stopping
    if stopping is not None and not whole(stopping, 1) and not isinstance(stopping, EarlyStopping):
        yield f"early_stopping={stopping!r} must be a number of epochs of at least 1, or EarlyStopping(...)."
    part = settings.validation
    if isinstance(part, bool | int | float) and not (_number(part) and 0 < part < 1):
        yield f"validation={part!r} must be a fraction between 0 and 1, a boolean column, or a DataFrame."


def _choices(settings: TorchSettings) -> Iterator[str]:
    for name, choices in _CHOICES.items():
        value = getattr(settings, name)
        if not any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
            hint = did_you_mean(str(value), [c for c in choices if isinstance(c, str)])
            yield f"{name}={value!r} is unknown; choose one of {', '.join(map(repr, choices))}.{hint}"
    stopping = settings.early_stopping
    if isinstance(stopping, EarlyStopping) and stopping.monitor is not None:
        known = [
            "loss",
            *(settings.named_metrics() if settings.has_metrics() else ()),
        ]
        known += [f"validation_{name}" for name in known] if settings.validation is not None else []
        if stopping.monitor not in known:
            yield f"early_stopping monitors {stopping.monitor!r}; the history will have {', '.join(known)}."


def _is_names(value: Any) -> bool:
    names = [value] if isinstance(value, str) else value
    return isinstance(names, list | tuple) and bool(names) and all(isinstance(n, str) and n for n in names)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
