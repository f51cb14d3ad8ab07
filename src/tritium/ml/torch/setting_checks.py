"""The functions among the settings without a call: what is wrong with them, names, kinds of losses (any process)."""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tritium.arguments import argument_names, name_of, needed_arguments, takes, takes_nothing
from tritium.hints import suggest
from tritium.ml import history
from tritium.ml.fields import is_number
from tritium.ml.torch.compiling import COMPILED, is_compiled
from tritium.model.engines.torch_transform import TRAINING, takes_training

OPTIMIZER = " Give a function of the parameters: lambda p: torch.optim.Adam(p)."
ONE_OPTIMIZER = (
    "TorchEstimator trains with one optimizer, which may have several groups of parameters. A GAN, whose parts have an "
    "optimizer and a loss each, is LightningEstimator's: docs/several-optimizers.md has one in 40 lines."
)
_KERAS = ("keras", "tf_keras")
HOOKS = ("fp16", "bf16", "power_sgd")
DDP_FLAGS = ("static_graph", "find_unused_parameters", "broadcast_buffers", "gradient_as_bucket_view")
_FLAGS = (*DDP_FLAGS, "sync_batch_norm")
DDP_OPTIONS = ("bucket_cap_mb", *_FLAGS, "comm_hook")
NEEDS_GPUS = (
    'ddp_options={"sync_batch_norm": True} needs ranks on GPUs, as torch.nn.SyncBatchNorm can\'t compute on a CPU. Ask '
    "for gpus=1, or leave it out: BatchNorm then sees a rank's own batch."
)
_ONE_SCORE = ("BCEWithLogitsLoss", "BCELoss", "binary_cross_entropy", "binary_cross_entropy_with_logits")
_BY_CLASS = ("CrossEntropyLoss", "NLLLoss", "cross_entropy", "nll_loss", "MultiMarginLoss", "multi_margin_loss")
_OVER_WEIGHTS = ("CrossEntropyLoss", "NLLLoss", "cross_entropy", "nll_loss")
_PROBABILITIES = ("BCELoss", "binary_cross_entropy")
_LOSS = " Give an instance or a function: torch.nn.MSELoss()."


def model_problems(model: Any) -> Iterator[str]:
    """Yield what is wrong with `model`."""
    if not callable(model):
        yield f"model={model!r} is not a function."
    elif is_compiled(model):
        yield f"model is {COMPILED}"
    elif other := of_another_framework(model):
        yield f"model={name_of(model)} is {other}"
    elif isinstance(model, type) and (needed := needed_arguments(model)):
        yield (
            f"model={name_of(model)} is a class that needs {', '.join(needed)}; "
            f"give an instance, or a function that makes one."
        )


def of_another_framework(model: Any) -> str | None:
    """Return what a model of Keras or TensorFlow is, and who trains it; None for a torch.nn.Module and all else."""
    torch, tensorflow = sys.modules.get("torch"), sys.modules.get("tensorflow")
    if torch is not None and isinstance(model, torch.nn.Module):  # A model of Keras on torch is one, too.
        return None
    if type(model).__module__.partition(".")[0] in _KERAS:
        return "a model of Keras: KerasEstimator trains it, on each of Keras's back ends."
    if tensorflow is not None and isinstance(model, getattr(tensorflow, "Module", ())):
        return (
            "a module of TensorFlow, and TorchEstimator trains a torch.nn.Module. A Keras model is trained by "
            'KerasEstimator, a loop of your own by tritium.launch(fn, framework="tensorflow").'
        )
    return None


def optimizer_problems(optimizer: Any) -> Iterator[str]:
    """Yield what is wrong with `optimizer`."""
    if isinstance(optimizer, Mapping | Sequence) and not isinstance(optimizer, str):
        yield f"optimizer is a {type(optimizer).__name__}. {ONE_OPTIMIZER}"
    elif not callable(optimizer):
        shown = f"{type(optimizer).__name__}(…)" if hasattr(optimizer, "param_groups") else repr(optimizer)
        yield f"optimizer={shown} is not a function.{OPTIMIZER}"
    elif takes_nothing(optimizer):
        yield f"optimizer={name_of(optimizer)} takes nothing; it is called with the parameters.{OPTIMIZER}"
    elif len(needed := needed_arguments(optimizer)) > 1:
        yield (
            f"optimizer={name_of(optimizer)} needs {', '.join(needed)}; it is called with the module's "
            f"parameters alone.{OPTIMIZER}"
        )


def step_problems(step: Any, name: str, weight_col: str | None) -> Iterator[str]:
    """Yield what is wrong with `train_step` or `eval_step`, which has this `name`."""
    if step is None:
        return
    if not callable(step):
        yield f"{name}={step!r} is not a function."
    elif not takes(step, 2):
        arguments = ", ".join(argument_names(step)) or "nothing"
        more = f" {ONE_OPTIMIZER}" if needed_arguments(step)[2:] == ["optimizer"] else ""
        yield f"{name}={name_of(step)} takes {arguments}; it is called with (module, batch).{more}"
    if weight_col is not None:
        yield (
            f"weight_col can't weight the loss of a {name}. Take the weights there, as an input under a name of its "
            f'own: feature_cols={{"x": […], "w": [{weight_col!r}]}} and batch["w"]. The module then gets x '
            "and w by keyword, and the model needs that column when it predicts."
        )


def transform_problems(transform: Any) -> Iterator[str]:
    """Yield what is wrong with `transform`."""
    if transform is None:
        return
    if not callable(transform):
        yield f"transform={transform!r} is not a function."
    elif isinstance(transform, type):
        yield f"transform={name_of(transform)} is a class; give an instance, {name_of(transform)}(), or a function."
    elif not _takes_inputs(transform):
        arguments = ", ".join(argument_names(transform)) or "nothing"
        yield (
            f"transform={name_of(transform)} takes {arguments}; it is called with (inputs), or with (inputs, training) "
            "where its second argument is called training."
        )


def _takes_inputs(transform: Any) -> bool:
    try:
        signature = inspect.signature(transform)
        signature.bind(None, **({TRAINING: True} if takes_training(transform) else {}))
    except ValueError:  # Some builtins have no signature.
        return True
    except TypeError:
        return False
    return True


def loss_problems(loss: Any, weights: Any, labels: Sequence[str], *, several: bool) -> Iterator[str]:
    """Yield what is wrong with `loss` and `loss_weights`, for labels of these names; `several`: of a mapping."""
    if isinstance(loss, Mapping):
        yield from _losses_problems(loss, labels, several=several)
        losses = list(loss.values())
    else:
        losses = [] if loss is None else [loss]
        if several and is_of_torch(loss):
            names = ", ".join(repr(name) for name in labels)
            yield (
                f"label_cols has {len(labels)} labels ({names}), and loss={name_of(loss)} compares one. Give a loss "
                f"for each: loss={{{labels[0]!r}: …}}, or a function (output, labels) -> the mean over the rows, where "
                "labels is a mapping by these names."
            )
    for function in losses:
        if not callable(function):
            yield f"loss={function!r} is not a function.{_LOSS}"
        elif isinstance(function, type):
            yield f"loss={name_of(function)} is a class; give an instance, {name_of(function)}()."
        elif getattr(function, "reduction", "mean") == "sum":
            yield 'the loss has reduction="sum", with which N ranks can\'t agree with one. Use reduction="mean".'
    if weights is None:
        return
    if not isinstance(loss, Mapping) or not isinstance(weights, Mapping):
        yield f"loss_weights={weights!r} must be a mapping, as loss= is: label -> the factor of its loss."
        return
    for name, weight in weights.items():
        if name not in loss:
            yield f"loss_weights names {name!r}, for which there is no loss.{suggest(str(name), list(loss))}"
        elif not is_number(weight):
            yield f"loss_weights={{{name!r}: {weight!r}}} must be a number."


def _losses_problems(losses: Mapping[str, Any], labels: Sequence[str], *, several: bool) -> Iterator[str]:
    if not several:
        yield (
            "loss is a mapping, and label_cols is not. Name the labels: label_cols={name: column, …}, with a loss for "
            "each name."
        )
        return
    for name in losses:
        if name not in labels:
            yield f"loss names {name!r}, which is no label of label_cols.{suggest(str(name), labels)}"
    for name in labels:
        if name not in losses:
            yield f"loss has none for the label {name!r}."


def scheduler_problems(scheduler: Any) -> Iterator[str]:
    """Yield what is wrong with `lr_scheduler`; a class's second argument is recognised by its name, `steps`."""
    if scheduler is None:
        return
    if not callable(scheduler):
        yield f"lr_scheduler={scheduler!r} is not a function."
        return
    needed, by_keyword = needed_arguments(scheduler), needed_arguments(scheduler, inspect.Parameter.KEYWORD_ONLY)
    of_class = isinstance(scheduler, type) and needed[1:] not in ([], ["steps"])
    if len(needed) > 2 or by_keyword or of_class:
        yield (
            f"lr_scheduler={name_of(scheduler)} needs {', '.join([*needed, *by_keyword])}; it is called with the "
            f"optimizer, or with (optimizer, steps). Give a lambda with the rest filled in."
        )
    elif takes_nothing(scheduler):
        name = name_of(scheduler)
        yield f"lr_scheduler={name} takes nothing; it is called with the optimizer, or with (optimizer, steps)."


# ---- losses


def is_of_torch(loss: Any) -> bool:
    """Return whether `loss` is torch's own; a `functools.partial` of one is not."""
    home = loss.__module__ if inspect.isfunction(loss) else type(loss).__module__
    return str(home).startswith("torch.")


def is_of_one_score(loss: Any) -> bool:
    """Return whether `loss` is torch's own for one score a row against 0 or 1."""
    return _name_in_torch(loss) in _ONE_SCORE


def is_by_class(loss: Any) -> bool:
    """Return whether `loss` is torch's own for class indices against a score for each class."""
    return _name_in_torch(loss) in _BY_CLASS


def is_over_weights(loss: Any) -> bool:
    """Return whether `loss` is torch's own whose mean is over the weights of the labels' classes, not over rows."""
    return _name_in_torch(loss) in _OVER_WEIGHTS and option(loss, "reduction", "mean") == "mean"


def option(loss: Any, name: str, default: Any) -> Any:
    """Return an option of a loss of torch's: an attribute of a module, a keyword of a partial."""
    return loss.keywords.get(name, default) if isinstance(loss, functools.partial) else getattr(loss, name, default)


def _name_in_torch(loss: Any) -> str:
    """Return the name of a loss of torch's, also of a partial of one; "" for any other."""
    loss = loss.func if isinstance(loss, functools.partial) else loss
    return name_of(loss) if is_of_torch(loss) else ""


def gives_probabilities(loss: Any) -> bool:
    """Return whether `loss` is torch's own for probabilities."""
    return _name_in_torch(loss) in _PROBABILITIES


# ---- metrics


def are_metrics(metrics: Any) -> bool:
    """Return whether `metrics` is a mapping, a sequence or a MetricCollection."""
    return (isinstance(metrics, Mapping | Sequence) and not isinstance(metrics, str)) or _is_collection(metrics)


def metric_pairs(metrics: Any) -> list[tuple[str, Any]]:
    """Return names and metrics, those of a MetricCollection by its names for them. Two may have the same name."""
    metrics = [metrics] if _is_collection(metrics) else metrics
    pairs = metrics.items() if isinstance(metrics, Mapping) else [(metric_name(metric), metric) for metric in metrics]
    return [
        pair
        for name, metric in pairs
        for pair in (metric.items(keep_base=False) if _is_collection(metric) else [(name, metric)])
    ]


def metric_problems(metrics: Any) -> Iterator[str]:
    """Yield what is wrong with `metrics`."""
    if not are_metrics(metrics):
        yield f"metrics={metrics!r} must be a mapping from names to metrics, a list of metrics, or a MetricCollection."
        return
    pairs = metric_pairs(metrics)
    for name, metric in pairs:
        if not callable(metric) or isinstance(metric, type):
            yield f"the metric {name!r} is {metric!r}, neither a torchmetrics Metric nor a function of two."
        if name in history.NAMES:
            yield f"a metric is called {name!r}, as the history calls something else; choose another name."
    names = [name for name, _ in pairs]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"two metrics are called {name!r}; give a mapping from names to metrics."


def metric_name(metric: Any) -> str:
    """Return a metric's name in the history: MeanAbsoluteError() → mean_absolute_error."""
    name = name_of(metric)
    starts = [i and c.isupper() and not name[i - 1].isupper() for i, c in enumerate(name)]
    return "".join(f"_{c}" if start else c for c, start in zip(name, starts, strict=True)).lower()


def _is_collection(metrics: Any) -> bool:
    """Return whether `metrics` is a torchmetrics MetricCollection, a module that holds others by name."""
    return hasattr(metrics, "compute_groups") and hasattr(metrics, "items")


# ---- options of DDP


def ddp_problems(options: Any) -> Iterator[str]:
    """Yield what is wrong with `ddp_options`."""
    if options is None:
        return
    if not isinstance(options, Mapping):
        yield f'ddp_options={options!r} must be a mapping from options to values: {{"bucket_cap_mb": 50}}.'
        return
    for name, value in options.items():
        if name not in DDP_OPTIONS:
            yield f"ddp_options has no {name!r}.{suggest(str(name), DDP_OPTIONS)}"
        elif name == "comm_hook":
            yield from _hook_problems(value)
        elif name == "bucket_cap_mb" and not (is_number(value) and 0 < value < math.inf):
            yield f"ddp_options[{name!r}] is {value!r}, and must be a number of megabytes above 0."
        elif name in _FLAGS and not isinstance(value, bool):
            yield f"ddp_options[{name!r}] is {value!r}, and must be True or False."
    if options.get("static_graph") is True and options.get("find_unused_parameters") is True:
        yield (
            "ddp_options: with static_graph DDP finds the unused parameters in the first step; leave out "
            "find_unused_parameters."
        )


def _hook_problems(setting: Any) -> Iterator[str]:
    if setting is None or (isinstance(setting, str) and setting in HOOKS):
        return
    known = (
        f"Choose one of {', '.join(map(repr, HOOKS))}, or give a function (state, bucket) -> Future, or (state, it)."
    )
    if isinstance(setting, str):
        yield f"ddp_options['comm_hook'] is {setting!r}, which is unknown.{suggest(setting, HOOKS)}"
        return
    if isinstance(setting, tuple | list) and len(setting) != 2:
        yield f"ddp_options['comm_hook'] has {len(setting)} parts. {known}"
        return
    state, hook = parts_of_hook(setting)
    if not callable(hook):
        yield f"ddp_options['comm_hook'] is {hook!r}, and no function. {known}"
    elif not takes(hook, 2):
        arguments = ", ".join(argument_names(hook)) or "nothing"
        yield f"ddp_options['comm_hook'], {name_of(hook)}, takes {arguments}; it is called with (state, bucket)."
    elif type(state).__name__ == "PowerSGDState":
        yield (
            "ddp_options['comm_hook'] has as its state a PowerSGDState, which only a rank can make. Give a function "
            "that makes it there: (lambda: PowerSGDState(None, 2), powerSGD_hook)."
        )


def parts_of_hook(setting: Any) -> tuple[Any, Any]:
    """Return state and function of a `comm_hook` that is no name."""
    return tuple(setting) if isinstance(setting, tuple | list) else (None, setting)
