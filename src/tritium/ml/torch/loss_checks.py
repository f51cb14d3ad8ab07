"""Checks of a loss with what it is called with: classes, shapes, and means over rows (rank, driver)."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tritium.arguments import name_of
from tritium.errors import BadData, BadRow, BadSetting
from tritium.ml.torch.losses import Term
from tritium.ml.torch.setting_checks import is_by_class, is_of_one_score, is_of_torch
from tritium.ml.torch.settings import TorchSettings

_COPIES = 5  # a random loss grows by the same amount twice in one case of a hundred, and four times in none


def refuse_class(term: Term, output: Any, label: Any, error: Exception) -> None:
    """Raise BadRow if a loss has failed because a label is not an index of the module's scores."""
    if not isinstance(output, torch.Tensor) or not isinstance(label, torch.Tensor):
        return
    if output.ndim != 2 or label.ndim != 1 or label.is_floating_point():
        return
    scores, column = output.shape[1], term.column
    wrong = label[((label < 0) & (label != getattr(term.loss, "ignore_index", -100))) | (label >= scores)]
    if len(wrong):
        raise BadRow(
            f"label column {column!r} holds the class {int(wrong[0])}, and the module gives {scores} scores a row, for "
            f"the classes 0 to {scores - 1}. Let its last layer give a score for every class, or number the classes "
            f"from 0: StringIndexer in Spark, df[{column!r}].astype('category').cat.codes in pandas.",
            column=column,
            row_id=None,
            value=int(wrong[0]),
        ) from error


def is_of_two_classes(term: Term, settings: TorchSettings) -> bool:
    """Return whether a loss compares one score a row with the class 0 or 1."""
    return is_of_one_score(term.loss) and (settings.task == "classification" or term.part is not None)


def refuse_third_class(term: Term, label: Any) -> None:
    """Raise BadRow for a label below 0 or above 1 in a loss of two classes; fractions between are allowed.

    Torch computes a loss for any number there.
    """
    wrong = label[(label < 0) | (label > 1)]
    if len(wrong):
        column, value = term.column, wrong[0].item()
        raise BadRow(
            f"label column {column!r} holds {value:g}, and loss={name_of(term.loss)} compares one score a row with "
            "0 or 1. Number the two classes 0 and 1; for more of them take torch.nn.CrossEntropyLoss() and let the "
            "module's last layer give a score for every class.",
            column=column,
            row_id=None,
            value=value,
        )


def refuse_broadcast(term: Term, output: Any, label: Any) -> None:
    """Raise BadData when output and label `[batch, ...]` would be broadcast, which trains silently wrong."""
    if not isinstance(output, torch.Tensor) or not isinstance(label, torch.Tensor) or output.shape == label.shape:
        return
    got, wanted = list(output.shape), list(label.shape)
    if min(output.ndim, label.ndim) == 0:
        raise BadData(f"The module gives {_shown(got)} for a label of {_shown(wanted)}: no output per row.")
    one_against_rows = {output.ndim, label.ndim} == {1, 2} and max(got, wanted, key=len)[1] == 1
    stretched = (
        is_of_torch(term.loss) and not is_by_class(term.loss) and label.is_floating_point() and _fits(got, wanted)
    )
    if not (one_against_rows or stretched):
        return
    if not label.is_floating_point():
        column = term.column
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


def refuse_sum(loss: Any, output: Any, label: Any) -> None:
    """Raise BadSetting for a loss that sums over rows, which ranks would average as if it were a mean.

    The loss is called for one row, and for up to five copies of that row: a mean stays, a sum grows by the same
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
    if isinstance(label, torch.Tensor) and label.is_floating_point():
        # Where output and label are equal, or one is zero, a sum may be zero, too.
        tried.append((tried[0][0], _farthest(label)))
        if isinstance(output, torch.Tensor):
            tried.append((tried[0][0] + 1, tried[0][1]))
    for row, its_label in tried:
        *found, again = (_copies_loss(loss, row, its_label, copies) for copies in (*range(1, _COPIES + 1), 1))
        if found[0] != again or not math.isfinite(sum(found)):
            return
        first, *others = (more - less for less, more in itertools.pairwise(found))
        largest = max(map(abs, found))
        if abs(first) > 0.05 * largest and all(abs(first - other) < 0.02 * abs(first) for other in others):
            raise BadSetting(
                f"loss={name_of(loss)} sums over the rows: it is {found[0]:.4g} of one row and {found[-1]:.4g} of that "
                f"row {_COPIES} times. Batches and ranks would be averaged as if it were a mean, and a short batch, or "
                "another number of ranks, would train otherwise. Let it give the mean over the rows: "
                'reduction="mean"; in a function of your own .mean() instead of .sum(), or .sum() / len(label).'
            )


def _copies_loss(loss: Any, output: Any, label: Any, copies: int) -> float:
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


def _fits(one: list[int], other: list[int]) -> bool:
    return all(a == b or 1 in (a, b) for a, b in zip(reversed(one), reversed(other), strict=False))


def _shown(shape: list[int]) -> str:
    return "[" + ", ".join(["batch", *map(str, shape[1:])]) + "]" if shape else "[]"
