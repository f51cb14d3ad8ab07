"""The training step, from a batch to its loss; the driver tries it once on zeros (rank, driver)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from tritium.data.batch import Batch
from tritium.errors import BadSetting
from tritium.ml.torch.compiling import uncompiled
from tritium.ml.torch.losses import (
    Losses,
    Tensors,
    is_of_two_classes,
    refuse_broadcast,
    refuse_class,
    refuse_sum,
    refuse_third_class,
)
from tritium.ml.torch.module import ModuleSettings
from tritium.ml.torch.random_state import random_state, set_random_state
from tritium.ml.torch.settings import TorchSettings
from tritium.model.engines.torch_outputs import outputs_of, rows_like
from tritium.model.engines.torch_transform import InputTransform
from tritium.model.signature import check_classes

if TYPE_CHECKING:
    from tritium.ml.torch.ranks import Ranks

Step = Callable[[Any, Tensors], tuple[torch.Tensor, Any]]
NamedStep = Callable[[Any, Tensors, list[str]], tuple[torch.Tensor, Any]]
"""A step that is also given the names of the module's inputs."""


def make_step(
    settings: TorchSettings, device: torch.device, *, validates: bool = False, ranks: Ranks | None = None
) -> Step:
    """Return the function (net, batch) -> (mean loss over the batch's rows, output), in the settings' precision.

    validates : for the batches of validation, for which `eval_step` takes the place of `train_step`.
    ranks : those that take a step together, each of its own rows.
    """
    user_step = (settings.eval_step if validates else None) or settings.train_step
    step = _loss_step(settings, ranks) if user_step is None else _call_user_step(user_step, bool(settings.metrics))
    transform = None if settings.transform is None else InputTransform(settings.transform)
    inputs = list(settings.inputs())

    kind = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(settings.precision)

    def in_precision(net: Any, batch: Tensors) -> tuple[torch.Tensor, Any]:
        names = inputs
        if transform is not None:
            module = net.module if isinstance(net, DistributedDataParallel) else net
            others = {name: value for name, value in batch.items() if name not in inputs}
            of_module = transform(
                {name: batch[name] for name in inputs},
                training=not validates,
                module=None if user_step is not None else module,
                taken=others,
            )
            columns, names = {**of_module, **others}, list(of_module)
            batch = batch.with_columns(columns) if isinstance(batch, Batch) else columns
        with nullcontext() if kind is None else torch.autocast(device.type, kind):
            return step(net, batch, names)

    return in_precision


def _call_user_step(user_step: Any, wants_output: bool) -> NamedStep:
    def step(net: Any, batch: Tensors, names: list[str]) -> tuple[torch.Tensor, Any]:
        if not isinstance(net, DistributedDataParallel):
            return _checked(user_step(net, batch), wants_output)
        return net(batch), net.module.take_output()

    return step


def _loss_step(settings: TorchSettings, ranks: Ranks | None) -> NamedStep:
    losses = Losses(settings, ranks)
    of_two_classes = [is_of_two_classes(term, settings) for term in losses.terms]
    checked = False

    def check(output: Any, batch: Tensors, *, first: bool) -> None:
        for of_two, (term, part, label) in zip(of_two_classes, losses.parts(output, batch), strict=True):
            if of_two and (first or label.device.type == "cpu"):  # It takes microseconds there, and a wait for a GPU.
                refuse_third_class(term, label)
            if first:
                refuse_broadcast(term, part, label)
                if settings.weight_col is None:
                    refuse_sum(term.loss, part, label)

    def step(net: Any, batch: Tensors, names: list[str]) -> tuple[torch.Tensor, Any]:
        nonlocal checked
        output = forward(net, batch, names)
        if not checked or any(of_two_classes):
            check(output, batch, first=not checked)
            checked = True
        try:
            return losses.mean(output, batch), output
        except (IndexError, RuntimeError) as error:
            for term, part, label in losses.parts(output, batch):
                refuse_class(term, part, label, error)
            raise

    return step


class StepModule(torch.nn.Module):
    """The module and a `train_step` together as one module, which DDP wraps.

    The step gets the module itself, so it may call any of its methods. Only the loss is returned through DDP, which
    searches its graph for the parameters that were used.
    """

    def __init__(self, module: torch.nn.Module, settings: TorchSettings) -> None:
        super().__init__()
        self.module = module
        self._step, self._wants_output = settings.train_step, bool(settings.metrics)
        self._output: Any = None

    def forward(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the mean loss over the batch's rows."""
        loss, self._output = _checked(self._step(self.module, batch), self._wants_output)
        return loss

    def take_output(self) -> Any:
        """Return, and release, what the step returned beside the loss of the last batch."""
        output, self._output = self._output, None
        return output


def forward(net: Any, batch: Mapping[str, torch.Tensor], inputs: list[str]) -> Any:
    """Call the module: with one input by position, with several by keyword."""
    return net(batch[inputs[0]]) if len(inputs) == 1 else net(**{name: batch[name] for name in inputs})


def describe(net: torch.nn.Module, settings: ModuleSettings, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the inputs and outputs of the trained module by name: dtype and shape of one row. Sets eval mode.

    Raises BadData and BadSetting for outputs that can't be predictions of the settings' task.
    """
    net.eval()
    inputs = {name: batch[name] for name in settings.inputs()}
    rows = rows_like(inputs)
    before = random_state(next(iter(inputs.values())).device)
    with torch.no_grad(), uncompiled(net):
        if settings.transform is not None:
            inputs = InputTransform(settings.transform)(inputs, training=False, module=net)
        outputs = outputs_of(forward(net, inputs, list(inputs)))
    set_random_state(before, next(iter(inputs.values())).device)  # A training that continues does this again.
    if settings.task == "classification":
        check_classes(outputs)
    return {"inputs": rows, "outputs": {o.name: (o.dtype, o.shape) for o in outputs}}


def _checked(returned: Any, wants_output: bool) -> tuple[torch.Tensor, Any]:
    """Return the loss and the output that a step of the user's has returned. Raises BadSetting for anything else."""
    loss, output = returned if isinstance(returned, tuple) else (returned, None)
    if not isinstance(loss, torch.Tensor) or loss.ndim != 0:
        kind = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else f"{loss!r}"
        raise BadSetting(f"train_step gave {kind}; it must give the mean loss as a tensor without dimensions.")
    if wants_output and output is None:
        raise BadSetting("train_step gave no output to compute the metrics of; let it return (loss, output).")
    return loss, output
