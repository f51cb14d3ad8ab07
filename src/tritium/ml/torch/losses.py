"""The losses of a training with PyTorch: one, or one for each of several labels (driver, rank)."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tritium.errors import BadData, BadSetting
from tritium.ml.arguments import name_of
from tritium.ml.settings import LABEL, WEIGHT
from tritium.ml.torch.settings import TorchSettings

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


class Losses:
    """The sum of a training's losses."""

    def __init__(self, settings: TorchSettings) -> None:
        self.terms = terms(settings)
        self._labels = list(settings.label_sources())
        weighted = settings.weight_col is not None
        self._per_row = [per_row(term.loss) for term in self.terms] if weighted else None

    def parts(self, output: Any, batch: Tensors) -> Iterator[tuple[Term, Any, Any]]:
        """Yield each loss with the output and the label that it is called with."""
        for term in self.terms:
            yield (term, *term.of(output, batch, self._labels))

    def mean(self, output: Any, batch: Tensors) -> torch.Tensor:
        """Return the mean over the batch's rows."""
        if len(self.terms) == 1:
            return self._mean(0, *self.terms[0].of(output, batch, self._labels), batch)
        each = (
            term.weight * self._mean(at, got, label, batch)
            for at, (term, got, label) in enumerate(self.parts(output, batch))
        )
        return functools.reduce(torch.add, each)

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
