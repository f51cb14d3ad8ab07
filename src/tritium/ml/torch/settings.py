"""`TorchSettings`: what and how to train with PyTorch (any process)."""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from tritium.errors import BadSetting
from tritium.ml import history
from tritium.ml.arguments import argument_names, name_of, needed_arguments, takes, takes_nothing
from tritium.ml.fields import is_number, setting
from tritium.ml.settings import Settings

_ONE_SCORE = ("BCEWithLogitsLoss", "BCELoss", "binary_cross_entropy", "binary_cross_entropy_with_logits")
_BY_CLASS = ("CrossEntropyLoss", "NLLLoss", "cross_entropy", "nll_loss", "MultiMarginLoss", "multi_margin_loss")
_PROBABILITIES = ("BCELoss", "binary_cross_entropy")
_RATE = " The learning rate is the optimizer's: optimizer=lambda p: torch.optim.Adam(p, lr=1e-3)."
_OPTIMIZER = " Give a function of the parameters: lambda p: torch.optim.Adam(p)."
_ADVICE = {"optimizer": _OPTIMIZER, "loss": " Give an instance or a function: torch.nn.MSELoss()."}


@dataclass(frozen=True, kw_only=True)
class TorchSettings(Settings):
    """What and how to train with PyTorch: every field is also a Spark ML Param of `TorchEstimator`."""

    framework: ClassVar[str] = "torch"
    choices: ClassVar[Mapping[str, tuple[Any, ...]]] = {**Settings.choices, "precision": ("fp32", "bf16")}
    hints: ClassVar[Mapping[str, str]] = {**Settings.hints, "lr": _RATE, "learning_rate": _RATE}
    loss_of_numbers: ClassVar[str] = "torch.nn.MSELoss()"

    model: Any = setting(
        "A torch.nn.Module, or a function without arguments that makes one. A function is called in every rank "
        "after torch.manual_seed(seed), and all ranks start from the weights of rank 0."
    )
    optimizer: Any = setting(
        "A function of the module's parameters: lambda p: torch.optim.Adam(p, lr=1e-3). "
        "The learning rate is never scaled with the number of ranks."
    )
    loss: Any = setting(
        "A function (output, label) -> mean over the rows of the batch: torch.nn.MSELoss(), "
        "torch.nn.functional.cross_entropy, your own. Not needed with train_step.",
        None,
    )
    train_step: Any = setting(
        "Your own step: a function (module, batch) -> loss, or (loss, output) if there are metrics. The module is your "
        "own, so its methods can be called, and any of its parameters may be left out. The loss is "
        "the mean over the batch's rows; the batch is a mapping of tensors. It runs for validation too, in eval "
        "mode and without gradients.",
        None,
    )
    lr_scheduler: Any = setting(
        "A function of the optimizer that makes a scheduler, which is stepped after each epoch "
        "(ReduceLROnPlateau with the validation loss, or else the loss). A function of two arguments (optimizer, "
        "steps) is also given the number of optimizer steps of the whole training, and stepped after each of them.",
        None,
    )
    clip_grad_norm: float | None = setting("The largest L2 norm that all gradients together may have; None: any.", None)
    precision: Literal["fp32", "bf16"] = setting(
        'What forward and loss compute in: "fp32", or "bf16" (autocast; weights stay float32).', "fp32"
    )
    metrics: Any = setting(
        "Name -> a torchmetrics Metric (synchronised over ranks by torchmetrics), or a function (output, label) "
        "-> mean over the rows of the batch (averaged over all rows of all ranks). A list takes the names of the "
        "functions and classes, a MetricCollection its own.",
        (),
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

    def problems(self) -> Iterator[str]:
        """Yield one sentence for each thing that is wrong."""
        yield from super().problems()
        yield from _functions(self)
        yield from _metrics(self)
        if (clip := self.clip_grad_norm) is not None and not (is_number(clip) and 0 < clip < math.inf):
            yield f"clip_grad_norm={clip!r} must be a number above 0."

    def make_module(self) -> Any:
        """Return a new module: the function's, or a copy of the one that was given.

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

    def make_optimizer(self, module: Any) -> Any:
        """Return the optimizer of a module's parameters. Raises BadSetting when `optimizer` returns something else."""
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
        """Return the scheduler of an optimizer. Raises BadSetting when `lr_scheduler` returns something else."""
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

    def scheduler_per_step(self) -> bool:
        """Return whether `lr_scheduler` takes (optimizer, steps), and so is stepped after each optimizer step."""
        return self.lr_scheduler is not None and len(needed_arguments(self.lr_scheduler)) == 2

    def has_metrics(self) -> bool:
        """Return whether `metrics` is a mapping, a sequence or a MetricCollection."""
        given = self.metrics
        return (isinstance(given, Mapping | Sequence) and not isinstance(given, str)) or _is_collection(given)

    def named_metrics(self) -> dict[str, Any]:
        """Return metrics by name; those of a MetricCollection by its names for them."""
        return dict(self.metric_pairs())

    def metric_pairs(self) -> list[tuple[str, Any]]:
        """Return `named_metrics` as pairs, of which two may have the same name."""
        given = [self.metrics] if _is_collection(self.metrics) else self.metrics
        pairs = given.items() if isinstance(given, Mapping) else [(metric_name(metric), metric) for metric in given]
        return [
            one
            for name, metric in pairs
            for one in (metric.items(keep_base=False) if _is_collection(metric) else [(name, metric)])
        ]

    def metric_names(self) -> Sequence[str]:
        """Return the names that metrics have in the history; none where `metrics` is of a wrong kind."""
        return list(self.named_metrics()) if self.has_metrics() else ()

    def is_of_one_score(self) -> bool:
        """Return whether the loss is torch's own for one score a row against 0 or 1."""
        return self._loss_of_torch() in _ONE_SCORE

    def is_by_class(self) -> bool:
        """Return whether the loss is torch's own for class indices against a score for each class."""
        return self._loss_of_torch() in _BY_CLASS

    def gives_probabilities(self) -> bool:
        """Return whether the loss is torch's own for probabilities."""
        return self._loss_of_torch() in _PROBABILITIES

    def _loss_of_torch(self) -> str:
        """Return the name of a loss of torch's, also of a partial of one; "" for any other."""
        loss = self.loss.func if isinstance(self.loss, functools.partial) else self.loss
        return name_of(loss) if is_of_torch(loss) else ""

    def has_own_step(self) -> bool:
        """Return whether there is a `train_step`."""
        return self.train_step is not None


def is_of_torch(loss: Any) -> bool:
    """Return whether `loss` is torch's own; a `functools.partial` of one is not."""
    home = loss.__module__ if inspect.isfunction(loss) else type(loss).__module__
    return str(home).startswith("torch.")


def _functions(settings: TorchSettings) -> Iterator[str]:
    for name in ("model", "optimizer", "loss", "train_step", "lr_scheduler"):
        value = getattr(settings, name)
        if not callable(value) and (value is not None or name in ("model", "optimizer")):
            shown = f"{type(value).__name__}(…)" if hasattr(value, "param_groups") else repr(value)
            yield f"{name}={shown} is not a function.{_ADVICE.get(name, '')}"
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
    if settings.weight_col is not None and settings.train_step is not None:
        yield (
            "weight_col can't weight the loss of a train_step. Take the weights there, as an input under a name of its "
            f'own: feature_cols={{"x": […], "w": [{settings.weight_col!r}]}} and batch["w"]. The module then gets x '
            "and w by keyword, and the model needs that column when it predicts."
        )
    yield from _scheduler(settings.lr_scheduler)


def _scheduler(given: Any) -> Iterator[str]:
    """Yield what is wrong with a scheduler's arguments; a class's second one is recognised by its name, `steps`."""
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
