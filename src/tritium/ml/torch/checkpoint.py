"""The training checkpoint: the state from which a training continues, saved and restored (rank)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from tritium.checkpoint.identity import refuse_another
from tritium.errors import BadSetting
from tritium.gang.rank.world import World
from tritium.ml.callbacks import TrainState, keeps_state
from tritium.ml.early_stopping import EarlyStoppingState, stays_stopped
from tritium.ml.torch.ddp import Replica
from tritium.ml.torch.divergence import DivergenceCheck
from tritium.ml.torch.epoch_metrics import EpochMetrics
from tritium.ml.torch.optimizer import OptimizerStep
from tritium.ml.torch.random_state import random_state, seed_generators, set_random_state
from tritium.ml.torch.ranks import Ranks
from tritium.ml.torch.schedule import Schedule
from tritium.ml.torch.settings import TorchSettings

if TYPE_CHECKING:
    from tritium.ml.torch.fsdp import ShardedModule


class TrainingCheckpoint:
    """The state of a training, saved as often as the settings say, and restored from an earlier attempt or run.

    `run_dir_required`: the user named the run directory, so it is an error when a rank does not reach it. Otherwise a
    training whose ranks do not share a disk runs without checkpoints, and logs that.
    """

    def __init__(
        self,
        settings: TorchSettings,
        world: World,
        shard: Any,
        ranks: Ranks,
        state: TrainState,
        replica: Replica | ShardedModule,
        stepping: OptimizerStep,
        divergence: DivergenceCheck,
        schedule: Schedule,
        early_stopping: EarlyStoppingState,
        identity: dict[str, Any],
        identity_with_code: dict[str, Any] | None,
        *,
        run_dir_required: bool,
    ) -> None:
        self._settings, self._world, self._shard, self._ranks = settings, world, shard, ranks
        self._state, self._replica, self._divergence = state, replica, divergence
        self._stepping, self._sharded = stepping, replica.sharded
        self._schedule, self._early_stopping = schedule, early_stopping
        self._identity, self._identity_with_code = identity, identity_with_code
        self._saved: Any = None
        self._on, self._run_dir_required = settings.checkpoint_every is not None, run_dir_required
        self._finished = self._stopped = False
        self._inputs: dict[str, Any] = {}
        self._metrics: list[Any] | None = None

    def load(self) -> None:
        """Read the newest checkpoint of the run directory, if there is one, and restore history, epoch and weights.

        `put_back` restores the rest. Raises BadSetting for the checkpoint of another training.
        """
        state = self._state
        if not self._on:
            return
        try:
            saved = self._world.checkpoint.load()
        except BadSetting as error:
            if self._run_dir_required:
                raise
            self._on = False
            if state.rank == 0:
                self._world.note(f"no checkpoints, so a retry starts from the beginning: {error}")
            return
        if saved is None:
            return
        refuse_another(saved.get("identity"), self._identity, saved.path, resized=saved.size != state.size)
        state.module.load_state_dict(self._restored(saved)["module"])
        state.history[:] = saved["history"]
        state.epoch = len(state.history)
        self._saved = saved

    def put_back(self) -> list[dict[str, Any]] | None:
        """Restore all that was saved, and return all ranks' positions; None without a checkpoint. A collective call.

        Must be called after `on_train_start`, in which callbacks repeat what they did when the training began: freeze
        layers, add groups to the optimizer, draw random numbers. The checkpoint has the later state of these.
        """
        state, saved, self._saved = self._state, self._saved, None
        self._schedule.on_train_start()
        if saved is None:
            self._replica.refresh(state.optimizer)
            return None
        self._put_back_groups(saved["groups"])
        self._replica.train_only(saved["trainable"])
        self._replica.refresh(state.optimizer)
        self._replica.restore(saved["gradients"])
        weights = self._restored(saved)
        state.module.load_state_dict(weights["module"])
        state.optimizer.load_state_dict(weights["optimizer"])
        if self._stepping.scaler is not None:
            self._stepping.scaler.load_state_dict(saved["scaler"])
        self._schedule.load_state_dict(saved["schedule"], saved["history"], saved["epochs"])
        early_stopping = {**saved["early_stopping"], "weights": weights["best"]}
        self._early_stopping.load_state_dict(early_stopping, len(state.history))
        self._inputs, state.step = saved["inputs"], saved.step
        rule = self._settings.stopping_rule()
        self._stopped = stays_stopped(saved["stopped"], saved["early_stopping"], rule)
        self._finished = saved["finished"] and self.epochs == len(state.history)
        self._metrics = [own["metrics"] for own in saved.own]
        if state.rank < saved.size == state.size:  # BatchNorm's statistics differ from rank to rank
            state.module.load_state_dict(saved.own[state.rank]["buffers"], strict=False)
            self._replica.comm_hook.load_state_dict(saved.own[state.rank]["comm_hook"], state.device)
        if state.rank < saved.size:
            set_random_state(saved.own[state.rank]["random"], state.device)
            self._put_back_callbacks(saved.own[state.rank]["callbacks"])
        else:  # a rank that the checkpoint does not have
            seed_generators(self._settings, self._settings.seed + state.rank + 1000 * saved.step)
        return [own["position"] for own in saved.own]

    def _restored(self, saved: Any) -> Mapping[str, Any]:
        """Return weights, optimizer state and best weights as this rank holds them: all of them, or a part.

        They may have been saved by another number of ranks, each with a part, or by one with all of them.
        """
        parts = [own["weights"] for own in saved.own]
        if self._sharded and parts[0] is not None and saved.size == self._ranks.size:
            return parts[self._ranks.rank]  # type: ignore[no-any-return]
        if parts[0] is None and not self._sharded:
            return saved["weights"]  # type: ignore[no-any-return]
        from tritium.ml.torch.sharded_state import WholeShapes  # with DTensor, whose import takes 1 s

        shapes = WholeShapes.of(self._state.module, saved["groups"])
        whole = saved["weights"] if parts[0] is None else shapes.joined(parts)
        return shapes.shared_out(whole, self._ranks) if self._sharded else whole  # type: ignore[no-any-return]

    def _put_back_callbacks(self, states: Sequence[Any]) -> None:
        for callback, kept in zip(self._settings.callbacks, states, strict=False):
            if kept is not None:
                callback.load_state_dict(kept)

    def _put_back_groups(self, groups: Sequence[Sequence[str]]) -> None:
        """Add the groups that a callback had added to the optimizer after an epoch."""
        named = dict(self._state.module.named_parameters())
        for names in groups[len(self._state.optimizer.param_groups) :]:
            if all(name in named for name in names):
                self._state.optimizer.add_param_group({"params": [named[name] for name in names]})

    @property
    def epochs(self) -> int:
        """The number of epochs in all: those that were done, if a callback or early stopping has ended the training."""
        return len(self._state.history) if self._stopped else self._settings.epochs

    def epoch_metrics(self, epoch: Any, ranks: Any) -> EpochMetrics:
        """Return the sums of an epoch: restored for one that continues, else zero."""
        labels = list(self._settings.label_sources())
        metrics = EpochMetrics(self._settings.named_metrics(), ranks, labels)
        before, self._metrics = self._metrics, None
        if before is not None and epoch.first > 0:
            metrics.load_state(before)
        return metrics

    def on_step(self, batch: Mapping[str, torch.Tensor], metrics: EpochMetrics) -> None:
        """Save after an optimizer step, when `checkpoint_every` says so."""
        if not self._inputs:
            self._inputs = {
                name: (str(batch[name].dtype).removeprefix("torch."), list(batch[name].shape[1:]))
                for name in self._settings.inputs()
            }
        if self._on:
            self._world.checkpoint.save(
                self._replicated,
                self._state.step,
                own=lambda: self._own(metrics),
                every=self._settings.checkpoint_every,
                keep=self._settings.checkpoint_keep,
            )

    def on_epoch_end(self) -> None:
        """Save and start again between two epochs, if the gang could be larger."""
        if self._on and len(self._state.history) < self.epochs:
            keep = self._settings.checkpoint_keep
            self._world.checkpoint.regroup(self._replicated, self._state.step, own=lambda: self._own(None), keep=keep)

    def on_train_end(self) -> None:
        """Save after the last epoch, so that a later fit with this run directory finds the training finished."""
        if self._on and self._run_dir_required and not self._finished:
            self._finished, self._stopped = True, len(self._state.history) < self._settings.epochs
            keep = self._settings.checkpoint_keep
            self._world.checkpoint.save(self._replicated, self._state.step, own=lambda: self._own(None), keep=keep)

    def example(self) -> dict[str, torch.Tensor]:
        """Return a batch of two rows of zeros, of the inputs' types and shapes."""
        return {
            name: torch.zeros((2, *shape), dtype=getattr(torch, dtype), device=self._state.device)
            for name, (dtype, shape) in self._inputs.items()
        }

    # ---- what is saved

    def _replicated(self) -> dict[str, Any]:
        self._divergence.check()  # a training that has diverged must not be saved
        state = self._state
        return {
            "identity": self._identity,
            "identity_with_code": self._identity_with_code,
            "weights": None if self._sharded else self._all_weights(),
            "scaler": None if self._stepping.scaler is None else self._stepping.scaler.state_dict(),
            "groups": self._groups(),
            "trainable": self._replica.trainable,
            "gradients": self._replica.order,
            "schedule": self._schedule.state_dict(),
            "early_stopping": self._early_stopping.state_dict() | {"weights": {}},
            "epochs": self._settings.epochs,
            "history": state.history,
            "inputs": self._inputs,
            "finished": self._finished,
            "stopped": self._stopped,
        }

    def _groups(self) -> list[list[str]]:
        """Return the parameters' names in each group of the optimizer; "" for one that is not the module's."""
        names = {id(parameter): name for name, parameter in self._state.module.named_parameters()}
        return [[names.get(id(p), "") for p in group["params"]] for group in self._state.optimizer.param_groups]

    def _all_weights(self) -> dict[str, Any]:
        """Return weights, optimizer state and the best weights so far: all of them, or this rank's part."""
        return {
            "module": dict(self._state.module.state_dict()),
            "optimizer": self._state.optimizer.state_dict(),
            "best": self._early_stopping.state_dict()["weights"],
        }

    def _own(self, metrics: EpochMetrics | None) -> dict[str, Any]:
        callbacks = self._settings.callbacks
        return {
            "random": random_state(self._state.device),
            "buffers": buffers(self._state.module) if self._state.rank else {},  # rank 0's are in the module's state
            "weights": self._all_weights() if self._sharded else None,
            "comm_hook": self._replica.comm_hook.state_dict(),
            "position": self._shard.state(),
            "metrics": None if metrics is None else metrics.state(),
            "callbacks": [callback.state_dict() if keeps_state(callback) else None for callback in callbacks],
        }


def buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return what a module's state holds beside its parameters, such as BatchNorm's running means."""
    kept = {name for name, _ in module.named_buffers()}
    return {name: value for name, value in module.state_dict().items() if name in kept}
