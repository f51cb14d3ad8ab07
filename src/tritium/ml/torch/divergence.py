"""The check that losses and gradients are finite numbers on every rank (rank)."""

from __future__ import annotations

import math
from typing import Any

import torch

from tritium.errors import TrainingDiverged
from tritium.ml.torch.ddp import Ranks

_INPUT, _LOSS, _GRADIENTS = range(3)  # what is not finite; the first of them is the cause


class DivergenceCheck:
    """Raises TrainingDiverged on every rank when a step's gradients or losses are NaN or infinite.

    A step needs no collective for it: a rank whose loss is not a number spoils the mean of the gradients, which all
    have anyway. Nor is it held up: it is looked at one step later, when a GPU has long computed it. A loss that leaves
    the gradients whole has done no harm, and is found when the ranks call `check`.
    """

    def __init__(self, ranks: Ranks, schema: Any) -> None:
        self._ranks, self._schema = ranks, schema
        self._watched: tuple[list[Any], torch.Tensor] | None = None
        self._bad: Any = None  # the first batch of this rank whose loss was not finite

    def watch(self, batches: list[Any], losses: list[torch.Tensor], norm: torch.Tensor) -> None:
        """One optimizer step: its batches and their losses, and the norm of the gradients that all ranks have."""
        self._look()
        self._watched = batches, torch.stack([norm, *(loss.to(norm.device) for loss in losses)])

    def check(self) -> None:
        """Before anything is kept, and at the end of an epoch: looks at the losses of all ranks, too. A collective."""
        self._look()
        if self._ranks.any(self._bad is not None):
            raise self._error([])

    def _look(self) -> None:
        """At the step that was watched last. What it raises it raises on every rank."""
        if self._watched is None:
            return
        (batches, seen), self._watched = self._watched, None
        norm, *losses = seen.tolist()
        if self._bad is None:
            self._bad = next((b for b, loss in zip(batches, losses, strict=True) if not math.isfinite(loss)), None)
        if not math.isfinite(norm):
            raise self._error(batches)

    def _error(self, batches: list[Any]) -> TrainingDiverged:
        """The same on every rank. A collective. `batches`: those of a step whose gradients are not finite."""
        bad = [] if self._bad is None else [self._bad]
        inputs = [(_INPUT, b.epoch, b.step, column) for b in [*bad, *batches] if (column := self._culprit(b))]
        losses = [(_LOSS, b.epoch, b.step, None) for b in bad]
        steps = [(_GRADIENTS, b.epoch, b.step, None) for b in batches[:1]]
        reports = self._ranks.gather([*inputs, *losses, *steps])
        found = [(*one, rank) for rank, report in enumerate(reports) for one in report]
        kind, epoch, step, column, rank = min(found, key=lambda one: one[:3])
        what = "The loss" if (_LOSS, epoch, step, None, rank) in found else "The norm of the gradients"
        if kind == _INPUT:
            cause = f"column {column!r} holds a value that is not finite. Leave such rows out, or clip them."
        elif kind == _LOSS:
            cause = "its input is finite. Lower the learning rate, set clip_grad_norm=, or scale the features."
        else:
            cause = (
                "losses and inputs are finite. Look for the root, logarithm or quotient of a zero in the module or the "
                "loss, whose derivative is infinite, or lower the learning rate."
            )
        unknown = kind == _GRADIENTS and self._ranks.size > 1  # of a mean over ranks nobody can say whose part it was
        where = "" if unknown else f", rank {rank} of {self._ranks.size}"
        return TrainingDiverged(
            f"{what} is NaN or infinite: epoch {epoch + 1}, step {step + 1}{where}; {cause}",
            epoch=epoch + 1,
            step=step + 1,
            rank=None if unknown else rank,
            column=column,
        )

    def _culprit(self, batch: Any) -> str | None:
        """The first source column with a value that is not finite."""
        for field in self._schema:
            value = batch[field.name]
            if not isinstance(value, torch.Tensor) or bool(torch.isfinite(value).all()):
                continue
            wrong = (~torch.isfinite(value.reshape(len(value), -1))).any(0).nonzero()[0]
            return str(field.sources[int(wrong) if field.packed else 0])
        return None
