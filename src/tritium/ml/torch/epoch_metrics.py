"""What an epoch adds up to over all rows of all ranks, and the alarm when one is not a number (rank)."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tritium.errors import TrainingDiverged
from tritium.ml.settings import LABEL
from tritium.ml.torch.ranks import Ranks

_INPUT, _LOSS, _GRADIENTS = range(3)  # what is not finite; the first of them is the cause


class Totals:
    """Sums of losses and metrics, exact over rows: a mean of means would weigh a short batch like a full one."""

    def __init__(self, metrics: Mapping[str, Any], ranks: Ranks) -> None:
        self._ranks = ranks
        self._own = {name: m for name, m in metrics.items() if not hasattr(m, "compute")}
        self._kept = {name: copy.deepcopy(m) for name, m in metrics.items() if hasattr(m, "compute")}
        for metric in self._kept.values():
            metric.to(ranks.device)
            metric.reset()
        self._rows = self._padded = 0
        self._began, self._before = time.monotonic(), 0.0  # seconds of this epoch in an earlier attempt or run
        self._sums = torch.zeros(1 + len(self._own), dtype=torch.float64, device=ranks.device)
        self._each = list(self._sums)  # views: adding by an index is three operations, at every step

    def add(self, batch: Any, loss: torch.Tensor, output: Any) -> None:
        """A batch's mean loss and its output; a row that is only there to keep the ranks in step does not count."""
        with torch.no_grad():
            label = batch.get(LABEL)
            means = [loss, *(metric(output, label) for metric in self._own.values())]
            for sum_, mean in zip(self._each, means, strict=True):
                if isinstance(mean, torch.Tensor):
                    sum_.add_(mean.detach(), alpha=batch.rows)
                else:
                    sum_.add_(mean * batch.rows)
            self._rows += batch.rows
            self._padded += len(next(iter(batch.values()))) - batch.rows
            if batch.rows:
                for metric in self._kept.values():
                    metric.update(output, label)

    def state(self) -> dict[str, Any]:
        """This rank's sums so far, for a checkpoint."""
        kept = {name: {each: getattr(metric, each) for each in metric._defaults} for name, metric in self._kept.items()}
        return {
            "sums": self._all(),
            "kept": kept,
            "updates": {n: m._update_count for n, m in self._kept.items()},
            "seconds": self._seconds(),
        }

    def _seconds(self) -> float:
        return self._before + time.monotonic() - self._began

    def load_state(self, states: Sequence[Mapping[str, Any] | None]) -> None:
        """Go on from the sums of all ranks of then; the ranks of now share them out."""
        self._before = max((state["seconds"] for state in states if state is not None), default=0.0)
        for state in states[self._ranks.rank :: self._ranks.size]:
            if state is not None:
                rows, padded, *_ = state["sums"].tolist()
                self._rows, self._padded = self._rows + int(rows), self._padded + int(padded)
                self._sums += state["sums"][2:].to(self._sums.device)
                for name, metric in self._kept.items():
                    _take_in(metric, state["kept"][name], state["updates"][name])

    def close(self, epoch: int) -> dict[str, Any]:
        """The entry in the history of the `epoch`-th epoch, from 1; its seconds are those in which its rows were taken.

        A collective.
        """
        means, rows, padded, seconds = self._collect()
        return {
            "epoch": epoch,
            **means,
            "seconds": seconds,
            "rows": rows,
            "rows_per_second": rows / seconds,
            "rows_padded": padded,
        }

    def means(self, *, uneven: bool = False) -> dict[str, Any]:
        """Loss and metrics alone. A collective. `uneven`: some rank may have added nothing."""
        if uneven:
            self._kept = {name: self._merged(metric) for name, metric in self._kept.items()}
        return self._collect()[0]

    def _merged(self, metric: Any) -> Any:
        """The metric over the rows of all ranks, for where some have none: torchmetrics can't synchronise those."""
        state = {name: getattr(metric, name) for name in metric._defaults}
        state = {name: list(value) if isinstance(value, list) else value for name, value in state.items()}
        each = self._ranks.gather((state, metric._update_count))
        metric.reset()
        for kept, updates in each:
            if updates:
                _take_in(metric, kept, updates)
        metric._to_sync = metric.sync_on_compute = False
        return metric

    def _all(self) -> torch.Tensor:
        """Rows, padded rows, and the sums of losses and metrics."""
        counts = torch.tensor([self._rows, self._padded], dtype=torch.float64, device=self._sums.device)
        return torch.cat([counts, self._sums])

    def _collect(self) -> tuple[dict[str, Any], int, int, float]:
        """Means, rows, padded rows, and the seconds of rank 0: a history is the same on every rank."""
        seconds = self._sums.new_tensor([0.0 if self._ranks.rank else self._seconds()])
        rows, padded, *sums, of_first = self._ranks.sum(torch.cat([self._all(), seconds])).tolist()
        found: dict[str, Any] = dict(zip(["loss", *self._own], (s / rows for s in sums), strict=True))
        for name, metric in self._kept.items():
            value = metric.compute()
            found |= value if isinstance(value, Mapping) else {name: value}
            metric.reset()
        plain = {name: v.tolist() if isinstance(v, torch.Tensor) else v for name, v in found.items()}
        return plain, int(rows), int(padded), of_first


def _take_in(metric: Any, kept: Mapping[str, Any], updates: int) -> None:
    """Add a share to a metric, as torchmetrics does when it synchronises ranks (it has no call for a single one)."""
    for name, value in kept.items():
        mine, reduce = getattr(metric, name), metric._reductions[name]
        if isinstance(mine, list):
            setattr(metric, name, [*mine, *(part.to(metric.device) for part in value)])
            continue
        value = value.to(metric.device)
        both = value if metric._update_count == 0 or reduce is None else reduce(torch.stack([mine, value]))
        setattr(metric, name, both)
    metric._update_count += updates


class Alarm:
    """Raises TrainingDiverged on every rank when a step's gradients or losses are NaN or infinite.

    A step needs no collective for it: a rank whose loss is not a number spoils the mean of the gradients, which all
    have anyway. Nor is it held up: it is looked at one step later, when a GPU has long computed it. A loss that leaves
    the gradients whole has done no harm, and is found when the ranks `settle`.
    """

    def __init__(self, ranks: Ranks, schema: Any) -> None:
        self._ranks, self._schema = ranks, schema
        self._watched: tuple[list[Any], torch.Tensor] | None = None
        self._bad: Any = None  # the first batch of this rank whose loss was not finite

    def watch(self, batches: list[Any], losses: list[torch.Tensor], norm: torch.Tensor) -> None:
        """One optimizer step: its batches and their losses, and the norm of the gradients that all ranks have."""
        self._look()
        self._watched = batches, torch.stack([norm, *(loss.to(norm.device) for loss in losses)])

    def settle(self) -> None:
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
