"""Progress of a training: its log of steps and epochs, if `verbose` (rank)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from tritium.ml.epoch_settings import EpochSettings

_SECONDS = 0.5


class TrainingProgress:
    """The progress of a training, logged at most twice a second during steps, and once an epoch."""

    def __init__(self, settings: EpochSettings, world: Any) -> None:
        self._settings, self._world = settings, world
        self._rows = 0
        self._last = 0.0

    def on_step(self, epoch: Any, batches: Sequence[Any], loss: Any) -> None:
        """Log an optimizer step over these batches, if one is due; `loss` is a number, an array of one, or None."""
        self._rows += sum(batch.rows for batch in batches)
        now = time.monotonic()
        if self._settings.verbose and now - self._last >= _SECONDS:
            self._last = now
            known = {} if loss is None else {"loss": loss}
            self._log(epoch=epoch.number, step=batches[-1].step, **known)

    def on_epoch_end(self, epoch: Any, entry: Mapping[str, Any]) -> None:
        """Log an epoch by its `entry` in the history, once for all ranks."""
        if self._settings.verbose and self._world.rank == 0:
            shown = {k: v for k, v in entry.items() if isinstance(v, float) and k not in ("seconds", "rows_per_second")}
            self._log(epoch=epoch.number, step=epoch.steps - 1, steps=epoch.steps, **shown)

    def _log(self, **values: Any) -> None:
        self._world.log(epochs=self._settings.epochs, **(values | {"rows": self._rows}))
