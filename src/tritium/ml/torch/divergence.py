"""The check that losses and gradients are finite on every rank (rank)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from tritium.errors import TrainingDiverged
from tritium.ml.torch.ranks import Ranks

_INPUT, _LOSS, _GRADIENTS = range(3)
"""Kinds of numbers that are not finite, of which the lowest is the cause."""


class DivergenceCheck:
    """A check that raises TrainingDiverged on every rank when a step's gradients or losses are NaN or infinite.

    A step needs no collective for it: one rank's loss that is not finite makes the mean of the gradients not finite,
    which all ranks have. Nor does a step wait: its values are read one step later, when a GPU has computed them. A loss
    that leaves the gradients finite does no harm, and is found when the ranks call `check`.
    """

    def __init__(self, ranks: Ranks, schema: Any, precision: str = "fp32", *, transforms: bool = False) -> None:
        self._ranks, self._schema, self._precision = ranks, schema, precision
        self._transforms = transforms
        self._watched: tuple[list[Any], torch.Tensor] | None = None
        self._bad: Any = None
        """The first batch of this rank whose loss was not finite."""

    def watch(self, batches: list[Any], losses: list[torch.Tensor], norms: Sequence[torch.Tensor]) -> None:
        """Take one optimizer step: its batches, their losses, and norms of the gradients, equal on all ranks."""
        self._look()
        device = losses[0].device
        self._watched = batches, torch.stack([number.to(device) for number in (*losses, *norms)])

    def check(self) -> None:
        """Check the losses of all ranks, too, before a checkpoint and at the end of an epoch. A collective call."""
        self._look()
        if self._ranks.any(self._bad is not None):
            raise self._error([])

    def _look(self) -> None:
        """Check the step that was watched last. Raises on every rank, or on none."""
        if self._watched is None:
            return
        (batches, seen), self._watched = self._watched, None
        numbers = seen.tolist()
        losses, norms = numbers[: len(batches)], numbers[len(batches) :]
        if self._bad is None:
            self._bad = next((b for b, loss in zip(batches, losses, strict=True) if not math.isfinite(loss)), None)
        if not all(map(math.isfinite, norms)):
            raise self._error(batches)

    def _error(self, batches: list[Any]) -> TrainingDiverged:
        """Return the error, the same on every rank. A collective call. `batches`: a step with non-finite gradients."""
        bad = [] if self._bad is None else [self._bad]
        inputs = [(_INPUT, b.epoch, b.step, column) for b in [*bad, *batches] if (column := self._culprit(b))]
        losses = [(_LOSS, b.epoch, b.step, None) for b in bad]
        steps = [(_GRADIENTS, b.epoch, b.step, None) for b in batches[:1]]
        reports = self._ranks.gather([*inputs, *losses, *steps])
        causes = [(*cause, rank) for rank, report in enumerate(reports) for cause in report]
        kind, epoch, step, column, rank = min(causes, key=lambda cause: cause[:3])
        number = "The loss" if (_LOSS, epoch, step, None, rank) in causes else "The norm of the gradients"
        if kind == _INPUT:
            advice = f"column {column!r} holds a value that is not finite. Leave such rows out, or clip them."
        elif kind == _LOSS:
            advice = "its input is finite. Lower the learning rate, set clip_grad_norm=, or scale the features."
            if self._transforms:
                advice = "the columns are finite. Look at what transform= makes of them; else lower the learning rate."
        else:
            advice = (
                "losses and inputs are finite. Look for the root, logarithm or quotient of a zero in the module or the "
                "loss, whose derivative is infinite, or lower the learning rate."
            )
        if kind != _INPUT and self._precision == "fp16":
            advice += ' In float16 a number above 65,504 is infinite; precision="bf16" has the range of float32.'
        unknown = kind == _GRADIENTS and self._ranks.size > 1  # A mean does not show which rank it was.
        where = "" if unknown else f", rank {rank} of {self._ranks.size}"
        return TrainingDiverged(
            f"{number} is NaN or infinite: epoch {epoch + 1}, step {step + 1}{where}; {advice}",
            epoch=epoch + 1,
            step=step + 1,
            rank=None if unknown else rank,
            column=column,
        )

    def _culprit(self, batch: Any) -> str | None:
        """Return the first source column with a value that is not finite, or None."""
        for field in self._schema:
            value = batch[field.name]
            if not isinstance(value, torch.Tensor) or bool(torch.isfinite(value).all()):
                continue
            column = (~torch.isfinite(value.reshape(len(value), -1))).any(0).nonzero()[0]
            return str(field.sources[int(column) if field.packed else 0])
        return None
