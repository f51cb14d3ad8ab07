"""The part of the dry run that calls optimizer, scheduler and metrics (driver)."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from tritium.arguments import name_of
from tritium.errors import BadData, BadSetting, TritiumError
from tritium.ml.dry_run import needs_rank, text_of
from tritium.ml.torch.losses import label_in
from tritium.ml.torch.optimizer import make_optimizer, takes_module
from tritium.ml.torch.schedule import is_per_step, make_scheduler
from tritium.ml.torch.setting_checks import OPTIMIZER
from tritium.ml.torch.settings import TorchSettings

_STEPS = (100, 100_000)  # assumed for a scheduler: the real number depends on the rows
WITHOUT = "check='off' leaves this trial out."


def try_optimizer(settings: TorchSettings, module: torch.nn.Module) -> Any:
    """Return the optimizer of a module; None where it can't be made here, e.g. as only the ranks have its library.

    Raises BadSetting when `optimizer` fails, or returns something else.
    """
    try:
        return make_optimizer(settings, module)
    except TritiumError:
        raise
    except Exception as error:
        if needs_rank(error):
            return None
        forms = ["the model's parameters", "the model itself"]
        first, second = reversed(forms) if takes_module(settings.optimizer) else forms
        other = None if error.__context__ is None else text_of(error.__context__)
        both = "" if other in (None, text_of(error)) else f" Called with {second} it raises {other}."
        raise BadSetting(
            f"optimizer={name_of(settings.optimizer)} fails, called with {first}: {text_of(error)}.{both}{OPTIMIZER}",
            setting="optimizer",
        ) from error


def try_scheduler(settings: TorchSettings, optimizer: Any) -> None:
    """Make the scheduler. Raises BadSetting when `lr_scheduler` fails, or makes something that can't be stepped.

    Spoils `optimizer` for other uses.
    """
    if settings.lr_scheduler is None or optimizer is None:
        return
    failure: Exception | None = None
    for steps in _STEPS if is_per_step(settings) else _STEPS[:1]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                make_scheduler(settings, optimizer, *([steps] if is_per_step(settings) else []))
                return
        except TritiumError:
            raise
        except Exception as error:  # noqa: BLE001 - a number of steps may be too small or too large for it
            if needs_rank(error):
                return
            failure = error
    if failure is not None:
        called = f"the optimizer and {_STEPS[0]} steps" if is_per_step(settings) else "the optimizer"
        raise BadSetting(
            f"lr_scheduler={name_of(settings.lr_scheduler)} fails, called with {called}: {text_of(failure)}. Give a "
            "function of the optimizer: lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 10). "
            f"{WITHOUT}",
            setting="lr_scheduler",
        ) from failure


def try_metrics(settings: TorchSettings, output: Any, batch: Mapping[str, torch.Tensor]) -> None:
    """Call each metric with an output of two rows and their label. Raises BadData for one that can't take them.

    A metric may fail for rows of zeros alone, as it needs rows of two classes: then it is called with other values.
    """
    zero = label_in(batch, list(settings.label_sources()))
    for name, metric in settings.named_metrics().items():
        failure = _failure(metric, output, zero)
        if failure is None or needs_rank(failure):
            continue
        if (again := _failure(metric, _varied(output), _varied(zero))) is None or needs_rank(again):
            continue
        raise BadData(
            f"The metric {name!r} can't take what there is: {text_of(failure)}\nIt was called with"
            f"\n  - the module's output {_shown(output)}\n  - the label {_shown(zero)}\n"
            f"These were two rows of zeros; {WITHOUT}",
            setting="metrics",
        ) from failure


def _failure(metric: Any, output: Any, label: Any) -> Exception | None:
    """Return the error that a metric, which keeps its state, has with these; None where it takes them."""
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if hasattr(metric, "compute"):
                metric = copy.deepcopy(metric).cpu()
                metric.reset()
                metric.update(output, label)
                metric.compute()
            else:
                torch.zeros((), dtype=torch.float64).add_(metric(output, label))  # as EpochMetrics does
    except Exception as error:  # noqa: BLE001 - the caller decides what it means
        return error
    return None


def _varied(value: Any) -> Any:
    """Return the same tensors with rows of other values: 0 and 1 in integers, and in others what they have and 1."""
    if isinstance(value, torch.Tensor):
        return value.detach() + torch.arange(len(value)).to(value.dtype).reshape(-1, *[1] * (value.ndim - 1))
    if isinstance(value, Mapping):
        return {name: _varied(one) for name, one in value.items()}
    return type(value)(_varied(one) for one in value) if type(value) in (tuple, list) else value


def _shown(value: Any) -> str:
    """Return shapes and dtypes as text: `[batch, 3] float32`."""
    if isinstance(value, torch.Tensor):
        shape = ", ".join(["batch", *map(str, value.shape[1:])])
        return f"[{shape}] {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name!r}: {_shown(one)}" for name, one in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "(" + ", ".join(map(_shown, value)) + ")"
    return type(value).__name__
