"""`EpochMetrics`: loss and metrics of an epoch over all rows of all ranks (rank)."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tritium.ml.history import epoch_entry
from tritium.ml.settings import LABEL
from tritium.ml.torch.ddp import Ranks


class EpochMetrics:
    """Sums of losses and metrics over rows, as a mean of batch means would weigh a short batch like a full one."""

    def __init__(self, metrics: Mapping[str, Any], ranks: Ranks) -> None:
        self._ranks = ranks
        self._own = {name: m for name, m in metrics.items() if not hasattr(m, "compute")}
        self._kept = {name: copy.deepcopy(m) for name, m in metrics.items() if hasattr(m, "compute")}
        for metric in self._kept.values():
            metric.to(ranks.device)
            metric.reset()
        self._rows = self._padded = 0
        self._began, self._before = time.monotonic(), 0.0  # seconds of this epoch in earlier attempts or runs
        self._sums = torch.zeros(1 + len(self._own), dtype=torch.float64, device=ranks.device)
        self._each = list(self._sums)  # views, as adding by an index takes three operations at every step

    def add(self, batch: Any, loss: torch.Tensor, output: Any) -> None:
        """Add a batch by its mean loss and its output; rows that only pad it to equal steps do not count."""
        if not batch.rows:  # its loss or a metric may be NaN, and NaN * 0 is NaN
            self._padded += len(next(iter(batch.values())))
            return
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
            for metric in self._kept.values():
                metric.update(output, label)

    def state(self) -> dict[str, Any]:
        """Return this rank's sums so far, for a checkpoint."""
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
        """Continue from the sums of all ranks of a checkpoint, distributed over the current ranks."""
        self._before = max((state["seconds"] for state in states if state is not None), default=0.0)
        for state in states[self._ranks.rank :: self._ranks.size]:
            if state is not None:
                rows, padded, *_ = state["sums"].tolist()
                self._rows, self._padded = self._rows + int(rows), self._padded + int(padded)
                self._sums += state["sums"][2:].to(self._sums.device)
                for name, metric in self._kept.items():
                    _take_in(metric, state["kept"][name], state["updates"][name])

    def entry(self, epoch: int) -> dict[str, Any]:
        """Return the history's entry of the `epoch`-th epoch, from 1; its seconds are those of its training steps.

        A collective call.
        """
        means, rows, padded, seconds = self._collect()
        return epoch_entry(epoch, means, seconds=seconds, rows=rows, padded=padded)

    def means(self, *, uneven: bool = False) -> dict[str, Any]:
        """Return loss and metrics alone. A collective call. `uneven`: some rank may have added nothing."""
        if uneven:
            self._kept = {name: self._merged(metric) for name, metric in self._kept.items()}
        return self._collect()[0]

    def _merged(self, metric: Any) -> Any:
        """Return the metric over the rows of all ranks when some have none, which torchmetrics can't synchronise."""
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
        """Return rows, padded rows, and the sums of losses and metrics."""
        counts = torch.tensor([self._rows, self._padded], dtype=torch.float64, device=self._sums.device)
        return torch.cat([counts, self._sums])

    def _collect(self) -> tuple[dict[str, Any], int, int, float]:
        """Return means, rows, padded rows, and rank 0's seconds, as the history must be the same on every rank."""
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
    """Merge a rank's state into a metric, as torchmetrics does when it synchronises (it has no call for one state)."""
    for name, value in kept.items():
        mine, reduce = getattr(metric, name), metric._reductions[name]
        if isinstance(mine, list):
            setattr(metric, name, [*mine, *(part.to(metric.device) for part in value)])
            continue
        value = value.to(metric.device)
        both = value if metric._update_count == 0 or reduce is None else reduce(torch.stack([mine, value]))
        setattr(metric, name, both)
    metric._update_count += updates
