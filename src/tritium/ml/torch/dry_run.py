"""The dry run: a step of training on two rows of zeros, before anything starts (driver)."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tritium.arguments import name_of
from tritium.data.batch import Batch
from tritium.data.schema import Field
from tritium.errors import BadData, BadSetting, TritiumError
from tritium.ml.dry_run import needs_rank, text_of
from tritium.ml.settings import WEIGHT
from tritium.ml.torch.compiling import try_compile
from tritium.ml.torch.ddp import refuse_unused
from tritium.ml.torch.dry_run_forward import (
    ROWS,
    Forward,
    ModuleDryRun,
    Shapes,
    failure_alone,
    shape_of,
    try_forward,
    try_transform,
    zeros,
)
from tritium.ml.torch.fsdp import refuse_unshardable
from tritium.ml.torch.losses import label_in
from tritium.ml.torch.module import make_module
from tritium.ml.torch.optimizer import make_optimizer, takes_module
from tritium.ml.torch.schedule import is_per_step, make_scheduler
from tritium.ml.torch.setting_checks import OPTIMIZER
from tritium.ml.torch.settings import TorchSettings
from tritium.ml.torch.step import Step, make_step
from tritium.model.engines.torch_outputs import named_outputs

_CPU = torch.device("cpu")
_STEPS = (100, 100_000)  # Assumed for a scheduler: the real number depends on the rows.
_WITHOUT = "check='off' leaves this trial out."


@dataclass(frozen=True)
class TorchFacts:
    """The result of the dry run for the ranks."""

    find_unused_parameters: bool = True
    """Whether some parameters got no gradient, or may get none in some step, so that DDP must not wait for them."""
    output_known: bool = False
    """Whether the module's output has been seen; it is not where the length of an array column is unknown."""
    tried: bool = False
    """Whether the step has been tried, too; it is not where the length of a label is unknown."""
    alone: str = ""
    """The error with which the module fails in training for a batch of one row; "" where it does not."""


class TorchDryRun(ModuleDryRun[TorchSettings]):
    """A module on zeros; nothing is run where the shape of an input is not known before the first row."""

    def __init__(self, settings: TorchSettings, fields: Mapping[str, Field], shapes: Shapes) -> None:
        """Call the module. Raises BadData with the shapes when it does not take them."""
        known = settings.check == "full" and set(settings.inputs()) <= set(shapes)
        self._forward = try_forward(make_module, settings, fields, shapes) if known else None

    def train(
        self, settings: TorchSettings, labels: Mapping[str, Field], shapes: Mapping[str, tuple[int, ...] | None]
    ) -> TorchFacts:
        """Make optimizer and scheduler, and compute the gradients of a loss. Raises BadSetting and BadData."""
        if self._forward is None:
            return TorchFacts()
        try_compile(self._forward.module, settings.compile)
        if settings.strategy == "fsdp":
            refuse_unshardable(self._forward.module)
        if settings.train_step is None:
            refuse_frozen(settings, self._forward.module)
        optimizer = try_optimizer(settings, self._forward.module)
        _try_scheduler(settings, optimizer)
        zero = {name: zeros(label, shape) for name, label in labels.items() if (shape := shapes[name]) is not None}
        if len(zero) < len(labels):
            return TorchFacts(output_known=True)
        if settings.eval_step is not None:
            try_own_step(settings, self._forward, zero, "eval_step")
        if settings.train_step is not None:  # Its next step may leave out other layers, so nothing is known of those.
            try_own_step(settings, self._forward, zero)
            return TorchFacts(output_known=True, tried=True)
        unused = try_step(settings, self._forward, labels, zero)
        refuse_unused(settings.ddp_options, unused)
        over_ranks = (settings.ddp_options or {}).get("sync_batch_norm")  # Then a rank's one row is not alone.
        alone = "" if over_ranks else failure_alone(settings, self._forward)
        return TorchFacts(find_unused_parameters=bool(unused), output_known=True, tried=True, alone=alone)


# ---- optimizer, scheduler and metrics


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


def _try_scheduler(settings: TorchSettings, optimizer: Any) -> None:
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
            f"{_WITHOUT}",
            setting="lr_scheduler",
        ) from failure


def _try_metrics(settings: TorchSettings, output: Any, batch: Mapping[str, torch.Tensor]) -> None:
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
            f"These were two rows of zeros; {_WITHOUT}",
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
                torch.zeros((), dtype=torch.float64).add_(metric(output, label))  # EpochMetrics does the same.
    except Exception as error:  # noqa: BLE001 - the caller decides what it means
        return error
    return None


def _varied(value: Any) -> Any:
    """Return the same tensors with rows of other values: 0 and 1 in integers, and in others what they have and 1."""
    if isinstance(value, torch.Tensor):
        return value.detach() + torch.arange(len(value)).to(value.dtype).reshape(-1, *[1] * (value.ndim - 1))
    if isinstance(value, Mapping):
        return {name: _varied(part) for name, part in value.items()}
    return type(value)(_varied(part) for part in value) if type(value) in (tuple, list) else value


def _shown(value: Any) -> str:
    """Return shapes and dtypes as text: `[batch, 3] float32`."""
    if isinstance(value, torch.Tensor):
        return shape_of(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name!r}: {_shown(part)}" for name, part in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "(" + ", ".join(map(_shown, value)) + ")"
    return type(value).__name__


# ---- loss and gradients


def refuse_frozen(settings: TorchSettings, module: torch.nn.Module) -> None:
    """Raise BadSetting for a module of which no parameter requires a gradient."""
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise BadSetting(
            f"model={name_of(settings.model)} has no weights to train: none of its parameters requires a gradient. "
            "Unfreeze some of them: layer.requires_grad_(True)."
        )


def try_step(
    settings: TorchSettings, tried: Forward, labels: Mapping[str, Field], zero: Mapping[str, torch.Tensor]
) -> list[str]:
    """Compute loss and gradients for zeros, and return the names of the parameters that got no gradient.

    Raises BadData when output and label don't fit, BadSetting when the loss can't be used.
    """
    batch = {**tried.inputs, **zero, WEIGHT: torch.ones(ROWS)}
    try:  # A loss with buffers, which counts its calls, say, begins in the ranks as the user has made it.
        loss = copy.deepcopy(settings.loss)
    except Exception:  # noqa: BLE001 - one that holds a result of autograd, say, can't be copied
        loss = settings.loss
    step = make_step(dataclasses.replace(settings, model=tried.module, loss=loss), _CPU)
    try:
        returned = _take_step(step, tried.module, batch)
    except TritiumError:
        raise
    except Exception as error:
        output = tried.output
        if not isinstance(output, torch.Tensor):
            raise BadData(_several(settings, output, error)) from error
        listed = "".join(f"\n  - {label.described(shape_of(zero[name]))}" for name, label in labels.items())
        advice = "".join(_advice(label, zero[name]) for name, label in labels.items()) if len(labels) == 1 else ""
        raise BadData(
            f"loss={name_of(settings.loss)} can't take what there is: {text_of(error)}\nIt was called with"
            f"\n  - the module's output {shape_of(output)}{listed}{advice}"
        ) from error
    _refuse_sparse(settings, tried.module)
    _try_metrics(settings, returned, batch)
    return [n for n, p in tried.module.named_parameters() if p.requires_grad and p.grad is None]


def _take_step(step: Step, module: torch.nn.Module, batch: Any, *, gradients: bool = True) -> Any:
    """Compute loss and gradients, restore the random state of this process, and return the step's output."""
    with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(gradients):
        loss, output = step(module, batch)
        if gradients:
            loss.backward()  # type: ignore[no-untyped-call]
    return output


def try_own_step(
    settings: TorchSettings, tried: Forward, zero: Mapping[str, torch.Tensor], name: str = "train_step"
) -> None:
    """Take a `train_step` or `eval_step` on zeros. Does nothing where that fails, e.g. as it uses collectives.

    Raises BadSetting when it asks for a batch column that does not exist, has an error that no values explain, or makes
    gradients that can't be clipped.
    """
    validates = name == "eval_step"
    with torch.random.fork_rng(devices=[]):
        inputs = try_transform(settings, tried.fields, tried.inputs, None, training=not validates)
    columns = {**inputs, **zero}
    batch = _AskedBatch(columns, scale=1.0, rows=ROWS, total=ROWS, step=0, epoch=0)
    step = make_step(dataclasses.replace(settings, model=tried.module, transform=None), _CPU, validates=validates)
    try:
        output = _take_step(step, tried.module.train(not validates), batch, gradients=not validates)
    except TritiumError:
        raise
    except Exception as error:
        if isinstance(error, KeyError) and batch.missing is not None and error.args == (batch.missing,):
            raise BadSetting(
                f"{name} asks for batch[{batch.missing!r}], and a batch has {', '.join(map(repr, batch))}. "
                "Inputs have the names that feature_cols gives them ('features' where it is no mapping), or those that "
                "a transform gives."
            ) from error
        by_no_value = isinstance(error, TypeError | AttributeError | NameError)
        if by_no_value and not settings.callbacks and not needs_rank(error):  # A callback may prepare the module.
            step_name = name_of(getattr(settings, name))
            raise BadSetting(f"{name}={step_name} fails: {text_of(error)}. {_WITHOUT}", setting=name) from error
        return
    finally:
        tried.module.train()
    _refuse_sparse(settings, tried.module)
    _try_metrics(settings, output, batch)


def _refuse_sparse(settings: TorchSettings, module: torch.nn.Module) -> None:
    """Raise BadSetting for gradients that can't be clipped, or that a hook of DDP can't exchange."""
    sparse = [n for n, p in module.named_parameters() if p.grad is not None and p.grad.is_sparse]
    if sparse and (settings.ddp_options or {}).get("comm_hook") is not None:
        raise BadSetting(
            f"{sparse[0]!r} has sparse gradients, which no comm_hook exchanges. Give its embedding sparse=False, or "
            "leave out comm_hook.",
            setting="ddp_options",
        )
    if settings.clip_grad_norm is not None and sparse:
        raise BadSetting(
            f"{sparse[0]!r} has sparse gradients, of which clip_grad_norm can't take the norm. Give its embedding "
            "sparse=False, or leave out clip_grad_norm.",
            setting="clip_grad_norm",
        )


class _AskedBatch(Batch):
    """A batch that records which column it was asked for and does not have."""

    __slots__ = ("missing",)

    def __init__(self, columns: dict[str, Any], **facts: Any) -> None:
        super().__init__(columns, **facts)
        self.missing: str | None = None

    def __getitem__(self, name: str) -> Any:
        try:
            return super().__getitem__(name)
        except KeyError:
            self.missing = name
            raise


def _several(settings: TorchSettings, output: Any, error: Exception) -> str:
    """Return the message for a loss that can't take the several tensors which the module returns."""
    kind = type(output).__name__
    article = "an" if kind[0] in "AEIOU" else "a"
    listed = "".join(f"\n  - {name} {shape_of(value)}" for name, value in named_outputs(output).items())
    pick = f"output[{next(iter(output))!r}]" if isinstance(output, Mapping) else "output[0]"
    return (
        f"The module returns {article} {kind} of {len(output)}, and loss={name_of(settings.loss)} can't take it: "
        f"{text_of(error)}{listed}\nReturn the one tensor from forward, or give a loss that picks it: "
        f"loss=lambda output, label: your_loss({pick}, label)."
    )


def _advice(field: Field, label: torch.Tensor) -> str:
    if label.is_floating_point():
        return '\nFor classes, give an integer label column, or task="classification" with a score per class.'
    column = field.sources[0]
    return (
        f"\nOne integer column means class indices. For a number to predict, cast {column!r} to double "
        f"(df[{column!r}].astype(float) in pandas)."
    )
