"""The losses of a training, one for each label, and the checks of their outputs and labels (driver, rank)."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tritium.arguments import name_of
from tritium.errors import BadData, BadRow, BadSetting
from tritium.ml.settings import LABEL, WEIGHT
from tritium.ml.torch.setting_checks import is_by_class, is_of_one_score, is_of_torch, is_over_weights, option
from tritium.ml.torch.settings import TorchSettings

if TYPE_CHECKING:
    from tritium.ml.torch.ranks import Ranks

_IGNORED = -100  # The default of torch.
_COPIES = 5  # A random loss grows by the same amount twice in one case of a hundred, and four times in none.
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Term:
    """One loss, of what the module returns against one label; `weight` is its factor in their sum."""

    loss: Any
    label: str | None
    """The batch column. None: the loss is a function of the whole output and a mapping of all labels."""
    column: str
    """The first source column of the label, for messages."""
    weight: float = 1.0
    part: int | None = None
    """Where the module returns several tensors without names: the position of the one for this label. None: the whole
    output is."""

    def of(self, output: Any, batch: Tensors, labels: list[str]) -> tuple[Any, Any]:
        """Return the output and the label for the loss. Raises BadData where the module has no output for it."""
        if self.label is None:
            return output, {name: batch[name] for name in labels}
        if self.part is None:
            return output, batch[self.label]
        if isinstance(output, Mapping) and self.label in output:
            return output[self.label], batch[self.label]
        if isinstance(output, tuple | list) and len(output) == len(labels):
            return output[self.part], batch[self.label]
        returned = f"a {type(output).__name__}"
        if isinstance(output, Mapping):
            returned = f"a dict of {', '.join(map(repr, output)) or 'nothing'}"
        elif isinstance(output, tuple | list):
            returned += f" of {len(output)}"
        names = ", ".join(map(repr, labels))
        raise BadData(
            f"loss= has a loss for each of the labels {names}, and the module returns {returned}. Let forward return a "
            f"dict with a tensor for each of them, or a tuple of {len(labels)} tensors in that order.",
            label=self.label,
        )


def terms(settings: TorchSettings) -> list[Term]:
    """Return the losses whose sum is minimised."""
    sources = settings.label_sources()
    columns = {name: source if isinstance(source, str) else source[0] for name, source in sources.items()}
    if not isinstance(settings.label_cols, Mapping):
        return [Term(settings.loss, LABEL, columns[LABEL])]
    if not isinstance(settings.loss, Mapping):
        return [Term(settings.loss, None, next(iter(columns.values())))]
    weights = settings.loss_weights or {}
    return [
        Term(settings.loss[name], name, column, float(weights.get(name, 1.0)), part)
        for part, (name, column) in enumerate(columns.items())
    ]


def label_in(batch: Tensors, names: list[str]) -> Any:
    """Return the label of a batch; where labels have names, a mapping of them."""
    return batch.get(LABEL) if names == [LABEL] else {name: batch[name] for name in names}


class WeightedMean:
    """The mean of torch's cross entropy and NLL: the sum of the losses of rows over that of their classes' weights.

    The mean over ranks of such means is not the mean of all rows, where `weight` is given or a label is ignored.
    """

    def __init__(self, loss: Any) -> None:
        self.sum = with_reduction(loss, "sum")
        self._loss, self._ignored = loss, option(loss, "ignore_index", _IGNORED)

    @property
    def _weight(self) -> torch.Tensor | None:
        """The weights of the classes, which a callback may change."""
        weight: torch.Tensor | None = option(self._loss, "weight", None)
        return weight

    def differs(self, label: torch.Tensor) -> bool:
        """Return whether it may not be the mean over rows, by the settings and the shape of the label alone.

        An array of labels may be padded with those that are ignored.
        """
        if label.is_floating_point():  # The mean of probabilities of classes is over rows.
            return False
        return self._weight is not None or self._ignored != _IGNORED or label.ndim > 1

    def weights(self, label: torch.Tensor) -> torch.Tensor:
        """Return the sum of the weights of a label's classes, a float64 without dimensions."""
        counted = label[label != self._ignored]
        weight = self._weight
        if weight is None:
            return torch.tensor(float(counted.numel()), dtype=torch.float64, device=label.device)
        return weight.to(label.device, torch.float64)[counted].sum()


class Losses:
    """The sum of a training's losses."""

    def __init__(self, settings: TorchSettings, ranks: Ranks | None = None) -> None:
        """`ranks`: those that each take a part of every batch; None: means are of the rows of one process."""
        self.terms = terms(settings)
        self._labels = list(settings.label_sources())
        weighted = settings.weight_col is not None
        self._per_row = [per_row(term.loss) for term in self.terms] if weighted else None
        over_weights = [not weighted and is_over_weights(term.loss) for term in self.terms]
        self._means = [
            WeightedMean(term.loss) if over else None for term, over in zip(self.terms, over_weights, strict=True)
        ]
        self._ranks = ranks if ranks is not None and ranks.size > 1 else None
        self.over_weights = any(over_weights)
        """Whether some mean may be over other weights than rows."""

    def parts(self, output: Any, batch: Tensors) -> Iterator[tuple[Term, Any, Any]]:
        """Yield each loss with the output and the label that it is called with."""
        for term in self.terms:
            yield (term, *term.of(output, batch, self._labels))

    def mean(self, output: Any, batch: Tensors) -> torch.Tensor:
        """Return the mean over the batch's rows.

        With several ranks a collective call where a mean is over the weights of classes. It is then what makes the mean
        over ranks, weighted by their rows, that of one process.
        """
        if self._ranks is not None and self.over_weights:
            return self._mean_of_ranks(output, batch, self._ranks)
        if len(self.terms) == 1:
            return self._mean(0, *self.terms[0].of(output, batch, self._labels), batch)
        weighted = (
            term.weight * self._mean(at, part, label, batch)
            for at, (term, part, label) in enumerate(self.parts(output, batch))
        )
        return functools.reduce(torch.add, weighted)

    def sums(self, output: Any, batch: Any, loss: torch.Tensor) -> list[torch.Tensor]:
        """Return for each loss its sum over a batch, and then for each by what the sum over batches is divided.

        loss : the batch's mean, which `mean` returned.
        """
        with torch.no_grad():
            sums, weights = [], []
            for at, (_, part, label) in enumerate(self.parts(output, batch)):
                mean = self._means[at]
                if mean is not None and mean.differs(label):
                    half = part.dtype in (torch.float16, torch.bfloat16)
                    sums.append(mean.sum(part.float() if half else part, label))
                    weights.append(mean.weights(label))
                else:
                    of_part = loss if len(self.terms) == 1 else self._mean(at, part, label, batch)
                    sums.append(of_part * batch.rows)
                    weights.append(torch.tensor(float(batch.rows), device=of_part.device))
        return [*sums, *weights]

    def of_sums(self, sums: Sequence[float]) -> float:
        """Return the whole loss of what `sums` returned, added over batches and ranks."""
        pairs = zip(self.terms, sums, sums[len(self.terms) :], strict=False)
        return math.fsum(term.weight * (total / weight if weight else math.nan) for term, total, weight in pairs)

    def _mean_of_ranks(self, output: Any, batch: Any, ranks: Ranks) -> torch.Tensor:
        parts = list(self.parts(output, batch))
        over_weights = {
            at: mean
            for at, (mean, (_, _, label)) in enumerate(zip(self._means, parts, strict=True))
            if mean is not None and mean.differs(label)
        }
        losses = [
            over_weights[at].sum(part, label) if at in over_weights else self._mean(at, part, label, batch)
            for at, (_, part, label) in enumerate(parts)
        ]
        if over_weights:
            weights = torch.stack([mean.weights(parts[at][2]) for at, mean in over_weights.items()])
            # A repeated row does not count.
            of_all_ranks = ranks.sum(weights if batch.rows else torch.zeros_like(weights))
            # The mean over ranks weights each loss by its rows, which this takes back.
            share = batch.total / max(1, batch.rows)
            for place, at in enumerate(over_weights):
                losses[at] = losses[at] * (share / of_all_ranks[place]).to(losses[at].dtype)
        if len(losses) == 1:
            return losses[0]
        return functools.reduce(
            torch.add, (term.weight * loss for (term, _, _), loss in zip(parts, losses, strict=True))
        )

    def _mean(self, at: int, output: Any, label: Any, batch: Tensors) -> torch.Tensor:
        if self._per_row is not None:
            losses = self._per_row[at](output, label)
            losses = losses if losses.ndim == 1 else losses.reshape(len(losses), -1).mean(1)
            return (losses * batch[WEIGHT]).mean()
        loss: torch.Tensor = self.terms[at].loss(output, label)
        return loss if loss.ndim == 0 else loss.mean()


def per_row(loss: Any) -> Callable[..., torch.Tensor]:
    """Return the same loss per row, without its mean. Raises BadSetting for one that can't do that."""
    if hasattr(loss, "reduction"):
        return with_reduction(loss, "none")
    try:
        offers = "reduction" in inspect.signature(loss).parameters
    except (TypeError, ValueError):
        offers = False
    if not offers:
        raise BadSetting(
            f"weight_col needs a loss per row, and loss={name_of(loss)} gives only its mean. Let it take "
            f'reduction="none", as those of torch.nn and torch.nn.functional do, or weight the loss in a train_step.'
        )
    return with_reduction(loss, "none")


def with_reduction(loss: Any, reduction: str) -> Callable[..., torch.Tensor]:
    """Return the same loss with another reduction: a copy of a module, a partial of a function."""
    if not hasattr(loss, "reduction"):
        return functools.partial(loss, reduction=reduction)
    changed: Callable[..., torch.Tensor] = copy.copy(loss)
    changed.reduction = reduction  # type: ignore[attr-defined]
    return changed


# ---- checks of a loss with an output and a label


def refuse_class(term: Term, output: Any, label: Any, error: Exception) -> None:
    """Raise BadRow if a loss has failed because a label is not an index of the module's scores."""
    if not isinstance(output, torch.Tensor) or not isinstance(label, torch.Tensor):
        return
    if output.ndim != 2 or label.ndim != 1 or label.is_floating_point():
        return
    scores, column = output.shape[1], term.column
    ignored = getattr(term.loss, "ignore_index", _IGNORED)
    beyond = label[((label < 0) & (label != ignored)) | (label >= scores)]
    if len(beyond):
        raise BadRow(
            f"label column {column!r} holds the class {int(beyond[0])}, and the module gives {scores} scores a row, "
            f"for the classes 0 to {scores - 1}. Let its last layer give a score for every class, or number the "
            f"classes from 0: StringIndexer in Spark, df[{column!r}].astype('category').cat.codes in pandas.",
            column=column,
            row_id=None,
            value=int(beyond[0]),
        ) from error


def is_of_two_classes(term: Term, settings: TorchSettings) -> bool:
    """Return whether a loss compares one score a row with the class 0 or 1."""
    return is_of_one_score(term.loss) and (settings.task == "classification" or term.part is not None)


def refuse_third_class(term: Term, label: Any) -> None:
    """Raise BadRow for a label below 0 or above 1 in a loss of two classes; fractions between are allowed.

    Torch computes a loss for any number there.
    """
    beyond = label[(label < 0) | (label > 1)]
    if len(beyond):
        column, value = term.column, beyond[0].item()
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
    of_output, of_label = list(output.shape), list(label.shape)
    if min(output.ndim, label.ndim) == 0:
        raise BadData(f"The module gives {_shown(of_output)} for a label of {_shown(of_label)}: no output per row.")
    one_against_rows = {output.ndim, label.ndim} == {1, 2} and max(of_output, of_label, key=len)[1] == 1
    stretched = (
        is_of_torch(term.loss)
        and not is_by_class(term.loss)
        and label.is_floating_point()
        and _fits(of_output, of_label)
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
        fix = f"Let the module return {_shown(of_label)}: leave out its squeeze, or end it with output.unsqueeze(-1)."
    else:
        fix = f"Let the module's last layer give {_shown(of_label)}, or name as many label_cols as it has outputs."
    raise BadData(
        f"The module's output has shape {_shown(of_output)} and the label {_shown(of_label)}: one would be broadcast "
        f"against the other, and training would go silently wrong. {fix}",
        output=tuple(of_output),
        label=tuple(of_label),
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
    trials = [(_first(output), _first(label))]
    if isinstance(label, torch.Tensor) and label.is_floating_point():
        # Where output and label are equal, or one is zero, a sum may be zero, too.
        trials.append((trials[0][0], _farthest(label)))
        if isinstance(output, torch.Tensor):
            trials.append((trials[0][0] + 1, trials[0][1]))
    for row, its_label in trials:
        *losses, again = (_copies_loss(loss, row, its_label, copies) for copies in (*range(1, _COPIES + 1), 1))
        if losses[0] != again or not math.isfinite(sum(losses)):
            return
        first, *others = (more - less for less, more in itertools.pairwise(losses))
        largest = max(map(abs, losses))
        if abs(first) > 0.05 * largest and all(abs(first - other) < 0.02 * abs(first) for other in others):
            raise BadSetting(
                f"loss={name_of(loss)} sums over the rows: it is {losses[0]:.4g} of one row and {losses[-1]:.4g} of "
                f"that row {_COPIES} times. Batches and ranks would be averaged as if it were a mean, and a short "
                "batch, or another number of ranks, would train otherwise. Let it give the mean over the rows: "
                'reduction="mean"; in a function of your own .mean() instead of .sum(), or .sum() / len(label).'
            )


def _copies_loss(loss: Any, output: Any, label: Any, copies: int) -> float:
    """Return the loss of `copies` copies of one row; NaN where it can't be computed."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            return float(loss(_repeated(output, copies), _repeated(label, copies)).mean())
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
