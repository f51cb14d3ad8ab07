"""`EpochMetrics`: loss and metrics of an epoch over all rows of all ranks (rank)."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from tritium.ml.history import epoch_entry
from tritium.ml.settings import LABEL
from tritium.ml.torch.losses import label_in
from tritium.ml.torch.ranks import Ranks

if TYPE_CHECKING:
    from tritium.ml.torch.losses import Losses

States = tuple[dict[str, Any], int]
"""The states of a metric by name, and the number of its updates."""


class EpochMetrics:
    """Sums of losses and metrics over rows, as a mean of batch means would weigh a short batch like a full one."""

    def __init__(
        self,
        metrics: Mapping[str, Any],
        ranks: Ranks,
        labels: Sequence[str] = (LABEL,),
        over_weights: Losses | None = None,
    ) -> None:
        """Begin with sums of zero.

        over_weights : the losses, where the mean of all rows is over the weights of their classes.
        """
        self._ranks, self._labels = ranks, list(labels)
        self._functions = {name: m for name, m in metrics.items() if not hasattr(m, "compute")}
        self._metrics = {name: copy.deepcopy(m) for name, m in metrics.items() if hasattr(m, "compute")}
        for metric in self._metrics.values():
            metric.to(ranks.device)
            metric.reset()
        # By dotted name: a wrapper has no states of its own, the metrics in it have.
        self._stateful = {
            path: part
            for name, metric in self._metrics.items()
            for path, part in metric.named_modules(prefix=name)
            if hasattr(part, "_defaults")
        }
        self._earlier: dict[str, list[States]] = {path: [] for path in self._stateful}
        self._resumed = False
        self._rows = self._padded = 0
        self._began = time.monotonic()
        self._seconds_before = 0.0
        """Seconds of this epoch in earlier attempts or runs."""
        self._over_weights = over_weights
        count = 1 + len(self._functions) + (0 if over_weights is None else 2 * len(over_weights.terms))
        self._sums = torch.zeros(count, dtype=torch.float64, device=ranks.device)
        self._views = list(self._sums)  # Adding by an index would take three operations at every step.

    def add(self, batch: Any, loss: torch.Tensor, output: Any) -> None:
        """Add a batch by its mean loss and output; rows that only pad it do not count."""
        if not batch.rows:  # Its loss or a metric may be NaN, and NaN * 0 is NaN.
            self._padded += len(next(iter(batch.values())))
            return
        with torch.no_grad():
            label = label_in(batch, self._labels) if self._functions or self._metrics else None
            means = [loss, *(metric(output, label) for metric in self._functions.values())]
            for sum_, mean in zip(self._views, means, strict=False):
                if isinstance(mean, torch.Tensor):
                    sum_.add_(mean, alpha=batch.rows)
                else:
                    sum_.add_(mean * batch.rows)
            if self._over_weights is not None:
                sums = self._over_weights.sums(output, batch, loss)
                for sum_, of_batch in zip(self._views[len(means) :], sums, strict=True):
                    sum_.add_(of_batch)
            self._rows += batch.rows
            self._padded += len(next(iter(batch.values()))) - batch.rows
            for metric in self._metrics.values():
                metric.update(output, label)

    def state(self) -> dict[str, Any]:
        """Return this rank's sums so far, for a checkpoint."""
        return {
            "sums": self._all(),
            "kept": {path: states_of(metric) for path, metric in self._stateful.items()},
            "earlier": self._earlier,
            "seconds": self._seconds(),
        }

    def _seconds(self) -> float:
        return self._seconds_before + time.monotonic() - self._began

    def load_state(self, states: Sequence[Mapping[str, Any] | None]) -> None:
        """Continue from the sums of all ranks of a checkpoint, distributed over the current ranks."""
        self._seconds_before = max((state["seconds"] for state in states if state is not None), default=0.0)
        taken = [state for state in states[self._ranks.rank :: self._ranks.size] if state is not None]
        for state in taken:
            rows, padded, *_ = state["sums"].tolist()
            self._rows, self._padded = self._rows + int(rows), self._padded + int(padded)
            self._sums += state["sums"][2:].to(self._sums.device)
        for path, metric in self._stateful.items():
            parts = [part for state in taken for part in (state["kept"][path], *state["earlier"][path]) if part[1]]
            together = parts[:1] if is_unreduced(metric) else parts
            take_in(metric, together)
            self._earlier[path] = parts[len(together) :]
        self._resumed = True

    def entry(self, epoch: int) -> dict[str, Any]:
        """Return the history's entry of the `epoch`-th epoch, from 1; its seconds are those of its training steps.

        A collective call.
        """
        means, rows, padded, seconds = self._collect(uneven=False)
        return epoch_entry(epoch, means, seconds=seconds, rows=rows, padded=padded)

    def means(self, *, uneven: bool = False) -> dict[str, Any]:
        """Return loss and metrics alone. A collective call. `uneven`: some rank may have added nothing."""
        return self._collect(uneven=uneven)[0]

    def _merge(self, path: str) -> None:
        """Give a metric the states of all ranks, where torchmetrics can't: some have no rows, or several states."""
        metric = self._stateful[path]
        by_rank = self._ranks.gather([states_of(metric), *self._earlier[path]])
        take_in(metric, [part for parts in by_rank for part in parts if part[1]])
        metric._to_sync = metric.sync_on_compute = False

    def _all(self) -> torch.Tensor:
        """Return rows, padded rows, and the sums of losses and metrics."""
        counts = torch.tensor([self._rows, self._padded], dtype=torch.float64, device=self._sums.device)
        return torch.cat([counts, self._sums])

    def _collect(self, *, uneven: bool) -> tuple[dict[str, Any], int, int, float]:
        """Return means, rows, padded rows, and rank 0's seconds, as the history must be the same on every rank."""
        seconds = self._sums.new_tensor([0.0 if self._ranks.rank else self._seconds()])
        rows, padded, *sums, of_first = self._ranks.sum(torch.cat([self._all(), seconds])).tolist()
        names = ["loss", *self._functions]
        means: dict[str, Any] = dict(zip(names, (s / rows for s in sums), strict=False))
        if self._over_weights is not None:
            means["loss"] = self._over_weights.of_sums(sums[len(names) :])
        for path, metric in self._stateful.items():
            if uneven or (self._resumed and is_unreduced(metric)):
                self._merge(path)
        for name, metric in self._metrics.items():
            value = metric.compute()
            means |= value if isinstance(value, Mapping) else {name: value}
            metric.reset()
        plain = {name: v.tolist() if isinstance(v, torch.Tensor) else v for name, v in means.items()}
        return plain, int(rows), int(padded), of_first


def states_of(metric: Any) -> States:
    """Return the states of a metric as they are now, without those of metrics inside it."""
    states = {name: getattr(metric, name) for name in metric._defaults}
    return {n: list(v) if isinstance(v, list) else v for n, v in states.items()}, metric._update_count


def is_unreduced(metric: Any) -> bool:
    """Return whether some state is a tensor without a reduction, as those of PearsonCorrCoef.

    Such states are stacked, and only `compute` takes them so; the next `update` does not.
    """
    return any(isinstance(d, torch.Tensor) and metric._reductions[n] is None for n, d in metric._defaults.items())


def take_in(metric: Any, parts: Sequence[States]) -> None:
    """Replace the states of a metric by all of these, merged as torchmetrics does when it synchronises ranks."""
    if not parts:
        return
    for name, reduce in metric._reductions.items():
        values = [states[name] for states, _ in parts]
        merged: Any = values[0]
        if isinstance(merged, list):
            merged = [piece.to(metric.device) for value in values for piece in value]
        elif len(values) == 1:
            merged = merged.to(metric.device)
        else:
            stacked = torch.stack([value.to(metric.device) for value in values])
            merged = stacked if reduce is None else reduce(stacked)
        setattr(metric, name, merged)
    metric._update_count = sum(updates for _, updates in parts)
