"""What is wrong with the functions among the settings, and how an optimizer's is called (any process)."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tritium.arguments import argument_names, name_of, needed_arguments, takes, takes_nothing
from tritium.hints import suggest
from tritium.ml.fields import is_number
from tritium.ml.torch.compiling import COMPILED, is_compiled
from tritium.ml.torch.loss_kinds import is_of_torch
from tritium.model.engines.torch_transform import TRAINING, takes_training

OPTIMIZER = " Give a function of the parameters: lambda p: torch.optim.Adam(p)."
ONE_OPTIMIZER = (
    "TorchEstimator trains with one optimizer, which may have several groups of parameters. A GAN, whose parts have an "
    "optimizer and a loss each, is LightningEstimator's: docs/several-optimizers.md has one in 40 lines."
)
_LOSS = " Give an instance or a function: torch.nn.MSELoss()."

_KERAS = ("keras", "tf_keras")


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
    if torch is not None and isinstance(model, torch.nn.Module):  # as a model of Keras on torch is
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


def call_optimizer(optimizer: Any, module: Any) -> Any:
    """Return what `optimizer` makes of the module's parameters, or of the module itself.

    It gets the module where its argument is called module or model, else the parameters. Where that fails it gets the
    other, so that `lambda m: Adam(m.parameters())` works, too: on every rank alike, as it depends on the function and
    the module alone. Where both fail the first error is raised, with the second as its context.
    """
    try:
        return optimizer(module if takes_module(optimizer) else module.parameters())
    except Exception as error:  # noqa: BLE001 - raised below
        try:
            return optimizer(module.parameters() if takes_module(optimizer) else module)
        except Exception:  # noqa: BLE001 - it is the context of the error
            raise error  # noqa: B904


def takes_module(optimizer: Any) -> bool:
    """Return whether `optimizer` takes the module, not its parameters, by the name of its argument."""
    return argument_names(optimizer)[:1] in (["module"], ["model"])


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
    except ValueError:  # some builtins have no signature
        return True
    except TypeError:
        return False
    return True


def loss_problems(loss: Any, weights: Any, labels: Sequence[str], *, several: bool) -> Iterator[str]:
    """Yield what is wrong with `loss` and `loss_weights`, for labels of these names; `several`: of a mapping."""
    if isinstance(loss, Mapping):
        yield from _losses_problems(loss, labels, several=several)
        each = list(loss.values())
    else:
        each = [] if loss is None else [loss]
        if several and is_of_torch(loss):
            names = ", ".join(repr(name) for name in labels)
            yield (
                f"label_cols has {len(labels)} labels ({names}), and loss={name_of(loss)} compares one. Give a loss "
                f"for each: loss={{{labels[0]!r}: …}}, or a function (output, labels) -> the mean over the rows, where "
                "labels is a mapping by these names."
            )
    for one in each:
        if not callable(one):
            yield f"loss={one!r} is not a function.{_LOSS}"
        elif isinstance(one, type):
            yield f"loss={name_of(one)} is a class; give an instance, {name_of(one)}()."
        elif getattr(one, "reduction", "mean") == "sum":
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


def scheduler_problems(given: Any) -> Iterator[str]:
    """Yield what is wrong with `lr_scheduler`; a class's second argument is recognised by its name, `steps`."""
    if given is None:
        return
    if not callable(given):
        yield f"lr_scheduler={given!r} is not a function."
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
