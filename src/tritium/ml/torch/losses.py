"""The losses of a training with PyTorch: one, or one for each of several labels (driver, rank)."""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tritium.arguments import name_of
from tritium.errors import BadData, BadSetting
from tritium.ml.settings import LABEL, WEIGHT
from tritium.ml.torch.setting_checks import is_over_weights, option
from tritium.ml.torch.settings import TorchSettings

if TYPE_CHECKING:
    from tritium.ml.torch.ddp import Ranks

_IGNORED = -100  # torch's default
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
    columns = {name: given if isinstance(given, str) else given[0] for name, given in sources.items()}
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
        found: torch.Tensor | None = option(self._loss, "weight", None)
        return found

    def differs(self, label: torch.Tensor) -> bool:
        """Return whether it may not be the mean over rows, by the settings and the shape of the label alone.

        An array of labels may be padded with those that are ignored.
        """
        if label.is_floating_point():  # probabilities of classes, whose mean is over rows
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
        each = (
            term.weight * self._mean(at, got, label, batch)
            for at, (term, got, label) in enumerate(self.parts(output, batch))
        )
        return functools.reduce(torch.add, each)

    def sums(self, output: Any, batch: Any, loss: torch.Tensor) -> list[torch.Tensor]:
        """Return for each loss its sum over a batch, and then for each by what the sum over batches is divided.

        loss : the batch's mean, which `mean` returned.
        """
        with torch.no_grad():
            found, weights = [], []
            for at, (_, got, label) in enumerate(self.parts(output, batch)):
                mean = self._means[at]
                if mean is not None and mean.differs(label):
                    half = got.dtype in (torch.float16, torch.bfloat16)
                    found.append(mean.sum(got.float() if half else got, label))
                    weights.append(mean.weights(label))
                else:
                    own = loss if len(self.terms) == 1 else self._mean(at, got, label, batch)
                    found.append(own * batch.rows)
                    weights.append(torch.tensor(float(batch.rows), device=own.device))
        return [*found, *weights]

    def of_sums(self, sums: Sequence[float]) -> float:
        """Return the whole loss of what `sums` returned, added over batches and ranks."""
        pairs = zip(self.terms, sums, sums[len(self.terms) :], strict=False)
        return math.fsum(term.weight * (total / weight if weight else math.nan) for term, total, weight in pairs)

    def _mean_of_ranks(self, output: Any, batch: Any, ranks: Ranks) -> torch.Tensor:
        parts = list(self.parts(output, batch))
        differ = {
            at: mean
            for at, (mean, (_, _, label)) in enumerate(zip(self._means, parts, strict=True))
            if mean is not None and mean.differs(label)
        }
        each = [
            differ[at].sum(got, label) if at in differ else self._mean(at, got, label, batch)
            for at, (_, got, label) in enumerate(parts)
        ]
        if differ:
            own = torch.stack([mean.weights(parts[at][2]) for at, mean in differ.items()])
            whole = ranks.sum(own if batch.rows else torch.zeros_like(own))  # a repeated row does not count
            share = batch.total / max(1, batch.rows)  # by which the mean over ranks multiplies what is returned
            for place, at in enumerate(differ):
                each[at] = each[at] * (share / whole[place]).to(each[at].dtype)
        if len(each) == 1:
            return each[0]
        return functools.reduce(torch.add, (term.weight * one for (term, _, _), one in zip(parts, each, strict=True)))

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
    again: Callable[..., torch.Tensor] = copy.copy(loss)
    again.reduction = reduction  # type: ignore[attr-defined]
    return again
