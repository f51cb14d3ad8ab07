"""The training checkpoint: the trees so far, from which a training continues (driver, rank)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightgbm
import numpy as np

from tritium.checkpoint.format import Damaged
from tritium.checkpoint.identity import identity_of, refuse_another
from tritium.checkpoint.store import Store
from tritium.data.fingerprint import REDRAWN, compare, summary
from tritium.data.schema import Field
from tritium.errors import BadSetting, CheckpointFailed, DataChanged
from tritium.gang.rank.world import World
from tritium.ml.early_stopping import EarlyStopping, EarlyStoppingState, stays_stopped
from tritium.ml.lightgbm.average import Added
from tritium.ml.lightgbm.settings import LightGBMSettings

_OF_MACHINE = ("num_threads", "num_thread", "nthread", "nthreads", "n_jobs", "verbosity", "verbose")


def identity(settings: LightGBMSettings, fields: Sequence[Field]) -> dict[str, Any]:
    """Return what must be equal for a training to continue: the settings of its trees, and the columns."""
    found = identity_of(settings, fields)
    native = found["native_params"] or {}
    return found | {"native_params": {name: value for name, value in native.items() if name not in _OF_MACHINE}}


def has_checkpoints(settings: LightGBMSettings) -> bool:
    """Return whether a training can be continued, and shall be."""
    return settings.checkpoint_every is not None and settings.boosting == "gbdt"


def peek(run_dir: str, settings: LightGBMSettings, now: Mapping[str, Any]) -> str | None:
    """Return a line for the user about what a fit in this run directory continues from; None: from the beginning.

    Raises BadSetting where the checkpoint is of another training. None also for a directory that this machine can't
    read: the ranks check it.
    """
    try:
        store = Store(run_dir)
        names = store.candidates() if has_checkpoints(settings) else []
        for name in names:
            try:
                _, state = store.outline(name)
            except Damaged:  # the ranks report it, and also take the one before it
                continue
            refuse_another(state.get("identity"), now, store.where(name))
            done = state["iteration"]
            if is_over(state, settings):
                return f"the training in {run_dir} has ended after {done} iterations: its model is returned"
            return f"a training in {run_dir} continues: iteration {done + 1} of {settings.num_iterations}"
    except (CheckpointFailed, OSError):
        pass
    return None


def is_over(state: Mapping[str, Any], settings: LightGBMSettings) -> bool:
    """Return whether nothing is left to do after this checkpoint by the current settings."""
    rule = settings.rule(state["metrics"]) if state["metrics"] else None
    ended = stays_stopped(state["stopped"], state["early_stopping"], rule)
    return bool(ended or state["ended"] is not None or state["iteration"] >= settings.num_iterations)


class Progress:
    """How far a training has come: what a checkpoint holds of it."""

    def __init__(self, settings: LightGBMSettings, tell: Callable[[str], Any]) -> None:
        self.booster: Any = None
        self.iteration = 0
        self.history: list[dict[str, Any]] = []
        self.metrics: list[str] = []
        """The names of LightGBM's metrics, in its order."""
        self.added: Added | None = None
        """What was added to the first tree of `booster`."""
        self.best = -1
        """The iteration whose model is returned, once early stopping has restored it; -1: the last one."""
        self.ended: int | None = None
        """The iteration whose model is returned, where a callback has ended the training."""
        self._settings, self._tell = settings, tell
        self.early_stopping = self._watch(None)

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Continue from a checkpoint, with a booster of its trees."""
        self.booster = lightgbm.Booster(model_str=saved["model"].tobytes().decode())
        self.iteration, self.history = saved["iteration"], list(saved["history"])
        self.metrics, self.ended = list(saved["metrics"]), saved["ended"]
        if self.metrics:
            self.early_stopping = self._watch(self._settings.rule(self.metrics))
            self.early_stopping.load_state_dict(saved["early_stopping"], self.iteration)

    def add(self, entry: dict[str, Any], metrics: list[str]) -> None:
        """Add the entry of an iteration to the history."""
        if not self.metrics:
            self.metrics = metrics
            self.early_stopping = self._watch(self._settings.rule(metrics) if metrics else None)
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

    def _watch(self, rule: EarlyStopping | None) -> EarlyStoppingState:
        def put(state: Mapping[str, Any]) -> None:
            self.best = int(state["iteration"])

        take = lambda: {"iteration": self.iteration}  # noqa: E731
        return EarlyStoppingState(rule, self._settings.num_iterations, take, put, self._tell)


class TrainingCheckpoint:
    """Saves the trees of a training as often as the settings say, and loads those of an earlier attempt or run.

    run_dir_required: the user named the run directory, so it is an error when a rank does not reach it. Otherwise a
    training whose ranks do not share a disk runs without checkpoints, and logs that.
    """

    def __init__(
        self, settings: LightGBMSettings, world: World, identity: Mapping[str, Any] | None, *, run_dir_required: bool
    ) -> None:
        self._settings, self._world, self._identity = settings, world, identity
        self._on, self._run_dir_required = has_checkpoints(settings) and identity is not None, run_dir_required
        self._fingerprint = world.shard("train").feed.fingerprint

    def load(self) -> Mapping[str, Any] | None:
        """Return the newest checkpoint of the run directory. Raises BadSetting for another training's, DataChanged."""
        if not self._on:
            return None
        try:
            saved = self._world.checkpoint.load()
        except BadSetting as error:
            if self._run_dir_required:
                raise
            self._on = False
            if self._world.rank == 0:
                self._world.note(f"no checkpoints, so a retry starts from the beginning: {error}")
            return None
        if saved is None:
            return None
        refuse_another(saved.get("identity"), self._identity or {}, saved.path)
        self._refuse_other_rows(saved)
        return saved

    def _refuse_other_rows(self, saved: Mapping[str, Any]) -> None:
        before, now = saved["fingerprint"], self._fingerprint
        if before is None or now is None or self._settings.if_data_changed == "restart":
            return
        found = summary(now)
        if compare(before, found) == "changed":
            raise DataChanged(
                f"The training can't continue: the rows are not those of the checkpoint: {found['rows']} rows, were "
                f"{before['rows']}. Train on the same rows, start over in another run_dir, or let the trees that are "
                f'added learn from the current rows: if_data_changed="restart".{REDRAWN}',
                shard="train",
                rows=found["rows"],
            )

    def save(self, progress: Progress, *, last: bool = False) -> None:
        """Save after an iteration, if a save is due; after the `last` one where the user has named the directory."""
        if self._on and (not last or self._run_dir_required):
            every = None if last else self._settings.checkpoint_every
            keep = self._settings.checkpoint_keep
            state, checkpoint = lambda: self._state(progress), self._world.checkpoint
            if checkpoint.save(state, progress.iteration, every=every, keep=keep) and not last:
                checkpoint.regroup(state, progress.iteration, keep=keep)

    def _state(self, progress: Progress) -> dict[str, Any]:
        if self._world.rank != 0:  # it writes the state of all
            return {}
        return {
            "identity": dict(self._identity or {}),
            "model": np.frombuffer(progress.text(), np.uint8),
            "iteration": progress.iteration,
            "history": progress.history,
            "metrics": progress.metrics,
            "early_stopping": progress.early_stopping.state_dict(),
            "stopped": progress.early_stopping.should_stop,
            "ended": progress.ended,
            "fingerprint": None if self._fingerprint is None else summary(self._fingerprint),
        }
