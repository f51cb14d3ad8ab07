"""The identity of a training, and what a checkpoint keeps of it: the trees so far (driver, rank)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightgbm
import numpy as np

from tritium.checkpoint.identity import identity_of
from tritium.checkpoint.training import Shared, Stateful, TrainingCheckpoint
from tritium.data.fingerprint import REDRAWN, compare, summary
from tritium.data.schema import Field
from tritium.errors import DataChanged
from tritium.gang.rank.world import World
from tritium.ml.early_stopping import EarlyStoppingState
from tritium.ml.lightgbm.average import Added
from tritium.ml.lightgbm.settings import LightGBMSettings

_OF_MACHINE = ("num_threads", "num_thread", "nthread", "nthreads", "n_jobs", "verbosity", "verbose")


def identity(settings: LightGBMSettings, fields: Sequence[Field]) -> dict[str, Any]:
    """Return what must be equal for a training to continue: the settings of its trees, and the columns."""
    facts = identity_of(settings, fields)
    native = facts["native_params"] or {}
    return facts | {"native_params": {name: value for name, value in native.items() if name not in _OF_MACHINE}}


class EarlyStoppingByMetric(EarlyStoppingState):
    """Early stopping by the first of LightGBM's metrics, whose names are known after an iteration."""

    def __init__(self, settings: LightGBMSettings, progress: BoostingState, tell: Callable[[str], Any]) -> None:
        def put(weights: Mapping[str, Any]) -> None:
            progress.best = int(weights["iteration"])

        super().__init__(None, settings.rounds, lambda: {"iteration": progress.iteration}, put, tell)
        self._settings = settings
        self.metrics: list[str] = []
        """The names of LightGBM's metrics, in its order."""

    def set_metrics(self, metrics: list[str]) -> None:
        """Set the rule, once the metrics are known."""
        if metrics and not self.metrics:
            self.metrics, self.rule = metrics, self._settings.rule(metrics)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, with the metrics."""
        return {**super().state_dict(), "metrics": self.metrics}

    def load_state_dict(self, state: Mapping[str, Any], epochs: int) -> None:
        """Continue after so many iterations, by the metrics of the checkpoint."""
        self.set_metrics(list(state["metrics"]))
        super().load_state_dict(state, epochs)


class BoostingState:
    """How far a training has come: its trees, which a checkpoint holds, and the history of their metrics."""

    def __init__(self, settings: LightGBMSettings, world: World) -> None:
        self.booster: Any = None
        self.history: list[dict[str, Any]] = []
        self.added: Added | None = None
        """What was added to the first tree of `booster`."""
        self.best = -1
        """The iteration whose model is returned, once early stopping has restored it; -1: the last one."""
        self.ended: int | None = None
        """The iteration whose model is returned, where a callback has ended the training."""
        self._world = world
        self.iteration = 0
        tell = world.note if world.rank == 0 else lambda _: None
        self.early_stopping = EarlyStoppingByMetric(settings, self, tell)

    def shared(self) -> dict[str, Any] | None:
        """Return the trees, which rank 0 writes."""
        if self._world.rank != 0:
            return None
        return {"model": np.frombuffer(self.text(), np.uint8), "iteration": self.iteration, "ended": self.ended}

    def own(self) -> None:
        """Return None: all ranks have the same trees."""
        return None

    def restore(self, shared: Any, own: Sequence[Any]) -> None:
        """Continue with a booster of the trees in a checkpoint."""
        self.booster = lightgbm.Booster(model_str=shared["model"].tobytes().decode())
        self.iteration, self.ended = shared["iteration"], shared["ended"]

    def add(self, entry: dict[str, Any], metrics: list[str]) -> None:
        """Add the entry of an iteration to the history."""
        self.early_stopping.set_metrics(metrics)
        self.history.append(entry)
        self.early_stopping.on_epoch_end(entry)

    def model(self) -> bytes:
        """Return the text of the trained model: up to the iteration that a callback or early stopping found best."""
        self.early_stopping.restore_best()
        best = self.best if self.ended is None else self.ended
        return self.text(self.history[best - 1]["trees"] if 0 < best <= len(self.history) else -1)

    def text(self, trees: int = -1) -> bytes:
        """Return LightGBM's text of so many trees of each class; -1: of all."""
        text: str = self.booster.model_to_string(num_iteration=trees)
        return (text if self.added is None else self.added.text(text)).encode()


class Rows:
    """The fingerprint of the rows to train on, by which a training continues on the same ones."""

    def __init__(self, settings: LightGBMSettings, world: World) -> None:
        self._settings, self._fingerprint = settings, world.shard("train").feed.fingerprint

    def shared(self) -> dict[str, Any] | None:
        """Return the fingerprint; None where there is none."""
        return None if self._fingerprint is None else summary(self._fingerprint)

    def own(self) -> None:
        """Return None: the fingerprint is that of all ranks' rows."""
        return None

    def restore(self, shared: Any, own: Sequence[Any]) -> None:
        """Raise DataChanged for other rows than those of the checkpoint, unless the settings take them."""
        if shared is None or self._fingerprint is None or self._settings.if_data_changed == "restart":
            return
        now = summary(self._fingerprint)
        if compare(shared, now) == "changed":
            raise DataChanged(
                f"The training can't continue: the rows are not those of the checkpoint: {now['rows']} rows, were "
                f"{shared['rows']}. Train on the same rows, start over in another run_dir, or let the trees that are "
                f'added learn from the current rows: if_data_changed="restart".{REDRAWN}',
                shard="train",
                rows=now["rows"],
            )


def checkpoint_of(
    settings: LightGBMSettings,
    world: World,
    progress: BoostingState,
    identity: Mapping[str, Any] | None,
    *,
    run_dir_required: bool,
) -> TrainingCheckpoint:
    """Return what saves and restores the progress of a training."""
    parts: dict[str, Stateful] = {"rows": Rows(settings, world), "trees": progress}
    early_stopping = progress.early_stopping
    parts["best"] = Shared(lambda: early_stopping.weights, early_stopping.load_weights)
    about = ({"identity": identity}, progress.history, early_stopping, parts)
    return TrainingCheckpoint(world, settings, *about, run_dir_required=run_dir_required)
