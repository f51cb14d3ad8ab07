"""The training step, from a batch to its loss; the driver tries it once on zeros (rank, driver)."""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from tritium.errors import BadData, BadRow, BadSetting
from tritium.ml.arguments import name_of
from tritium.ml.settings import LABEL, WEIGHT
from tritium.ml.torch.settings import TorchSettings, is_of_torch
from tritium.model.signature import Output, check_classes

Step = Callable[[Any, Mapping[str, torch.Tensor]], tuple[torch.Tensor, Any]]


def make_step(settings: TorchSettings, device: torch.device) -> Step:
    """Return the function (net, batch) -> (mean loss over the batch's rows, output), in the settings' precision."""
    own = settings.train_step
    inputs = list(settings.inputs())
    row_losses = per_row(settings.loss) if settings.weight_col is not None else None
    two_classes = settings.task == "classification" and settings.is_of_one_score()
    checked: list[bool] = []

    def step(net: Any, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, Any]:
        with torch.autocast(device.type, torch.bfloat16, enabled=settings.precision == "bf16"):
            if own is not None:
                if not isinstance(net, DistributedDataParallel):
                    return _own(own(net, batch), bool(settings.metrics))
                return net(batch), net.module.take_output()
            output = forward(net, batch, inputs)
            label = batch[LABEL]
            if two_classes and (not checked or label.device.type == "cpu"):
                refuse_third_class(label, settings)
            if not checked:
                refuse_broadcast(output, label, settings)
                if row_losses is None:
                    refuse_sum(settings.loss, output, label)
                checked.append(True)
            try:
                if row_losses is None:
                    loss = settings.loss(output, label)
                    loss = loss if loss.ndim == 0 else loss.mean()
                else:
                    loss = (_rows(row_losses(output, label)) * batch[WEIGHT]).mean()
            except (IndexError, RuntimeError) as error:
                refuse_class(output, label, settings, error)
                raise
        return loss, output

    return step


class OwnStep(torch.nn.Module):
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
        loss, self._output = _own(self._step(self.module, batch), self._wants_output)
        return loss

    def take_output(self) -> Any:
        """Return, and release, what the step returned beside the loss of the last batch."""
        output, self._output = self._output, None
        return output


def forward(net: Any, batch: Mapping[str, torch.Tensor], inputs: list[str]) -> Any:
    """Call the module: with one input by position, with several by keyword."""
    return net(batch[inputs[0]]) if len(inputs) == 1 else net(**{name: batch[name] for name in inputs})


def describe(net: torch.nn.Module, settings: TorchSettings, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the inputs and outputs of the trained module by name: dtype and shape of one row. Sets eval mode.

    Raises BadData and BadSetting for outputs that can't be predictions of the settings' task.
    """
    net.eval()
    inputs = {name: batch[name] for name in settings.inputs()}
    with torch.no_grad():
        outputs = outputs_of(forward(net, inputs, list(inputs)))
    if settings.task == "classification":
        check_classes(outputs)
    return {"inputs": _rows_like(inputs), "outputs": {o.name: (o.dtype, o.shape) for o in outputs}}


def outputs_of(output: Any) -> tuple[Output, ...]:
    """Return what a module returned as a signature has it. Raises BadData as `named_outputs` does."""
    return tuple(Output(name, *row) for name, row in _rows_like(named_outputs(output)).items())


def named_outputs(output: Any) -> dict[str, torch.Tensor]:
    """Return the tensors that a module returned, by name. Raises BadData where they can't be predictions."""
    if isinstance(output, torch.Tensor):
        outputs: dict[str, Any] = {"prediction": output}
    elif isinstance(output, Mapping):
        outputs = {str(name): value for name, value in output.items()}
    elif isinstance(output, tuple | list):
        outputs = {f"output_{i}": value for i, value in enumerate(output)}
    else:
        raise BadData(
            f"In eval mode, as prediction calls it, the module returns a {type(output).__name__}. Let it return a "
            "tensor, or a tuple or a dict of tensors."
        )
    for name, value in outputs.items():
        if not isinstance(value, torch.Tensor):
            what = "None" if value is None else f"a {type(value).__name__}"
            raise BadData(
                f"In eval mode, as prediction calls it, the module returns a {type(output).__name__} whose {name} is "
                f"{what}. Let it return tensors alone there, and leave the rest out (module.training tells the modes)."
            )
        if value.ndim == 0:
            raise BadData(
                f"In eval mode, as prediction calls it, the module returns one number for the whole batch ({name} has "
                "no row). Let forward return a row of output for each row, and compute the loss in loss= or train_step."
            )
    return outputs


def _rows_like(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {n: (str(t.dtype).removeprefix("torch."), tuple(t.shape[1:])) for n, t in tensors.items()}


def per_row(loss: Any) -> Callable[..., torch.Tensor]:
    """Return the same loss per row, without its mean. Raises BadSetting for one that can't do that."""
    if hasattr(loss, "reduction"):
        rows: Callable[..., torch.Tensor] = copy.copy(loss)
        rows.reduction = "none"  # type: ignore[attr-defined]
        return rows
    try:
        offers = "reduction" in inspect.signature(loss).parameters
    except (TypeError, ValueError):
        offers = False
    if not offers:
        raise BadSetting(
            f"weight_col needs a loss per row, and loss={name_of(loss)} gives only its mean. Let it take "
            f'reduction="none", as those of torch.nn and torch.nn.functional do, or weight the loss in a train_step.'
        )
    return functools.partial(loss, reduction="none")


def refuse_class(output: Any, label: torch.Tensor, settings: TorchSettings, error: Exception) -> None:
    """Raise BadRow if a loss has failed because a label is not an index of the module's scores."""
    if not isinstance(output, torch.Tensor) or output.ndim != 2 or label.ndim != 1 or label.is_floating_point():
        return
    scores, column = output.shape[1], settings.labels()[0]
    wrong = label[((label < 0) & (label != getattr(settings.loss, "ignore_index", -100))) | (label >= scores)]
    if len(wrong):
        raise BadRow(
            f"label column {column!r} holds the class {int(wrong[0])}, and the module gives {scores} scores a row, for "
            f"the classes 0 to {scores - 1}. Let its last layer give a score for every class, or number the classes "
            f"from 0: StringIndexer in Spark, df[{column!r}].astype('category').cat.codes in pandas.",
            column=column,
            row_id=None,
            value=int(wrong[0]),
        ) from error


def refuse_third_class(label: torch.Tensor, settings: TorchSettings) -> None:
    """Raise BadRow for a label below 0 or above 1 with which one score is compared; fractions between are allowed.

    Torch computes a loss for any number there. On a CPU every batch is checked, which takes microseconds; on a GPU only
    the first one of a rank, as each check waits for the device.
    """
    wrong = label[(label < 0) | (label > 1)]
    if len(wrong):
        column, value = settings.labels()[0], wrong[0].item()
        raise BadRow(
            f"label column {column!r} holds {value:g}, and loss={name_of(settings.loss)} compares one score a row with "
            "0 or 1. Number the two classes 0 and 1; for more of them take torch.nn.CrossEntropyLoss() and let the "
            "module's last layer give a score for every class.",
            column=column,
            row_id=None,
            value=value,
        )


def refuse_broadcast(output: Any, label: torch.Tensor, settings: TorchSettings) -> None:
    """Raise BadData when output and label `[batch, ...]` would be broadcast, which trains silently wrong."""
    if not isinstance(output, torch.Tensor) or output.shape == label.shape:
        return
    got, wanted = list(output.shape), list(label.shape)
    if min(output.ndim, label.ndim) == 0:
        raise BadData(f"The module gives {_shown(got)} for a label of {_shown(wanted)}: no output per row.")
    one_against_rows = {output.ndim, label.ndim} == {1, 2} and max(got, wanted, key=len)[1] == 1
    stretched = _is_elementwise(settings) and label.is_floating_point() and _fits(got, wanted)
    if not (one_against_rows or stretched):
        return
    if not label.is_floating_point():
        column = settings.labels()[0]
        fix = (
            "One integer label column means class indices. For a number to predict, cast it to double "
            f"(df[{column!r}].astype(float) in pandas); for classes, let the module give one score per class."
        )
    elif output.ndim < label.ndim:
        fix = f"Let the module return {_shown(wanted)}: leave out its squeeze, or end it with output.unsqueeze(-1)."
    else:
        fix = f"Let the module's last layer give {_shown(wanted)}, or name as many label_cols as it has outputs."
    raise BadData(
        f"The module's output has shape {_shown(got)} and the label {_shown(wanted)}: one would be broadcast "
        f"against the other, and training would go silently wrong. {fix}",
        output=tuple(got),
        label=tuple(wanted),
    )


def refuse_sum(loss: Any, output: Any, label: torch.Tensor) -> None:
    """Raise BadSetting for a loss that sums over rows, which ranks would average as if it were a mean.

    The loss is called for one row, and for two and three copies of that row: a mean stays, a sum grows by the same
    amount each time. One that can't take a single row, is random, keeps a state, or grows otherwise (as a contrastive
    one does) is accepted.

    A copy is called, so that state in attributes and buffers stays as it is, and on the CPU, as on a GPU a loss that
    fails can end the process. All labels are from the batch, as other values may not be classes.
    """
    try:
        loss = copy.deepcopy(loss)
        loss = loss.cpu() if isinstance(loss, torch.nn.Module) else loss
    except Exception:  # noqa: BLE001 - a loss that can't be copied can't be tried
        return
    tried = [(_first(output), _first(label))]
    if label.is_floating_point():  # where output and label are equal, or one is zero, a sum may be zero, too
        tried.append((tried[0][0], _farthest(label)))
        if isinstance(output, torch.Tensor):
            tried.append((tried[0][0] + 1, tried[0][1]))
    for row, its_label in tried:
        one, two, three, again = (_copies_loss(loss, row, its_label, copies) for copies in (1, 2, 3, 1))
        if one != again or not math.isfinite(one + two + three):
            return
        first, second = two - one, three - two
        largest = max(abs(one), abs(two), abs(three))
        if abs(first) > 0.05 * largest and abs(first - second) < 0.02 * abs(first):
            raise BadSetting(
                f"loss={name_of(loss)} sums over the rows: it is {one:.4g} of one row and {three:.4g} of that row "
                "three times. Batches and ranks would be averaged as if it were a mean, and a short batch, or another "
                'number of ranks, would train otherwise. Let it give the mean over the rows: reduction="mean"; in a '
                "function of your own .mean() instead of .sum(), or .sum() / len(label)."
            )


def _copies_loss(loss: Any, output: Any, label: torch.Tensor, copies: int) -> float:
    """Return the loss of `copies` copies of one row; NaN where it can't be computed."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            found = loss(_repeated(output, copies), _repeated(label, copies))
            return float(found.mean())
        except Exception:  # noqa: BLE001 - it may need several rows, or other ones
            return math.nan


def _first(value: Any) -> Any:
    """Return the first row on the CPU, of a tensor or of each tensor in a tuple, list or dict."""
    return _each(value, lambda tensor: (tensor[:1] if tensor.ndim else tensor).cpu())


def _farthest(label: torch.Tensor) -> torch.Tensor:
    """Return the row `[1, ...]` of the label `[batch, ...]` that differs most from the first one, on the CPU."""
    label = label.detach().cpu()
    row = int((label - label[:1]).abs().reshape(len(label), -1).sum(1).argmax())
    return label[row : row + 1]


def _repeated(value: Any, copies: int) -> Any:
    """Return `copies` copies of one row, of a tensor or of each tensor in a tuple, list or dict."""
    return _each(value, lambda tensor: tensor.repeat(copies, *[1] * (tensor.ndim - 1)) if tensor.ndim else tensor)


def _each(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value.detach())
    if isinstance(value, Mapping):
        return {name: _each(item, change) for name, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_each(item, change) for item in value)
    return value


def _is_elementwise(settings: TorchSettings) -> bool:
    """Return whether the loss is torch's own and elementwise, not one with a score per class."""
    return is_of_torch(settings.loss) and not settings.is_by_class()


def _fits(one: list[int], other: list[int]) -> bool:
    return all(a == b or 1 in (a, b) for a, b in zip(reversed(one), reversed(other), strict=False))


def _shown(shape: list[int]) -> str:
    return "[" + ", ".join(["batch", *map(str, shape[1:])]) + "]" if shape else "[]"


def _rows(losses: torch.Tensor) -> torch.Tensor:
    return losses if losses.ndim == 1 else losses.reshape(len(losses), -1).mean(1)


def _own(given: Any, wants_output: bool) -> tuple[torch.Tensor, Any]:
    loss, output = given if isinstance(given, tuple) else (given, None)
    if not isinstance(loss, torch.Tensor) or loss.ndim != 0:
        what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else f"{loss!r}"
        raise BadSetting(f"train_step gave {what}; it must give the mean loss as a tensor without dimensions.")
    if wants_output and output is None:
        raise BadSetting("train_step gave no output to compute the metrics of; let it return (loss, output).")
    return loss, output
