"""The callback by which a Trainer's epochs become those of an estimator (rank)."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.callbacks import Checkpoint
from torch.nn.parallel import DistributedDataParallel

from tritium.checkpoint.training import TrainingCheckpoint
from tritium.errors import BadSetting, TrainingDiverged
from tritium.frameworks.torch_memory import host_memory
from tritium.gang.rank.world import World
from tritium.ml.early_stopping import EarlyStoppingState
from tritium.ml.history import NAMES, epoch_entry, make_json
from tritium.ml.lightning.batches import Batches, Taken
from tritium.ml.lightning.checkpoint import LightningFile
from tritium.ml.lightning.settings import LightningSettings
from tritium.ml.progress import TrainingProgress


class Sums:
    """Sums over the batches of an epoch on this rank: of losses by row, of rows and of rows that only pad."""

    def __init__(self) -> None:
        self.rows = self.padded = 0
        self.loss: float | None = None
        """None where no step returned a loss."""
        self.seconds = 0.0

    def add(self, taken: Taken, loss: float | None) -> None:
        self.rows += taken.rows
        self.padded += taken.padded
        if loss is not None:
            # A repeated row must not count, also as its loss may be NaN.
            self.loss = (self.loss or 0.0) + (loss * taken.rows if taken.rows else 0.0)

    def state(self) -> list[Any]:
        return [self.rows, self.padded, self.loss, self.seconds]

    def take(self, states: list[list[Any]]) -> None:
        """Become the sum of these states; the seconds are the most of them."""
        self.rows, self.padded = (sum(state[at] for state in states) for at in (0, 1))
        losses = [state[2] for state in states if state[2] is not None]
        self.loss = sum(losses) if losses else None
        self.seconds = max((state[3] for state in states), default=0.0)


class TrainerCallback(Checkpoint):
    """Scales each rank's loss by its rows, and adds history, early stopping, progress and checkpoints to a Trainer.

    It is a `Checkpoint` so that Lightning calls it last, when the module and all other callbacks have logged.
    """

    def __init__(
        self,
        settings: LightningSettings,
        world: World,
        training: Batches,
        validating: Batches | None,
        early_stopping: EarlyStoppingState,
        checkpoint: TrainingCheckpoint,
        file: LightningFile,
        history: list[dict[str, Any]],
    ) -> None:
        self._settings, self._world = settings, world
        self._training, self._validating = training, validating
        self._early_stopping, self._checkpoint, self._file, self._history = early_stopping, checkpoint, file, history
        self._progress = TrainingProgress(settings, world)
        self.sums, self._validation = Sums(), Sums()
        self._taken: Taken | None = None
        self._validated: dict[str, float] = {}
        self._began = 0.0
        self._saved_step = -1

    # ---- the loss

    def backward(self, compute: Any, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute gradients whose average over ranks is that of the mean over all rows of all ranks."""
        assert self._taken is not None
        compute(loss * self._taken.scale, *args, **kwargs)

    # ---- training

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._file.trainer = trainer
        self._checkpoint.restore()
        sums = self._file.sums_of_ranks.restored
        if sums is not None and len(sums) == self._world.size and self._world.rank == 0:
            self.sums.take([one for one in sums if one is not None])
        self._saved_step = trainer.global_step
        self._began = time.monotonic()
        net = trainer.strategy.model
        if isinstance(net, DistributedDataParallel) and not net._comm_hooks:  # A strategy of the user's may have one.
            host_memory(net)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._taken = self._training.queue.popleft()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self._taken is not None
        loss = _loss_of(outputs)
        if loss is not None:  # Lightning has divided it.
            loss *= trainer.accumulate_grad_batches
        epoch, step = trainer.current_epoch, self._taken.step
        if loss is not None and self._taken.rows and not math.isfinite(loss):
            raise diverged(epoch, step, self._world.rank)
        self.sums.add(self._taken, loss)
        self._progress.on_step(self._training.current, [self._taken], loss)
        stepped = trainer.global_step > self._saved_step
        if stepped and not trainer.is_last_batch:  # The last one is saved with the epoch's entry.
            self._saved_step = trainer.global_step
            self._stop_clock()
            self._file.sums = self.sums
            self._checkpoint.save(trainer.global_step)
            self._file.sums = None
            self._began = time.monotonic()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._stop_clock()
        entry = self._entry(trainer)
        make_json(entry)
        self._history.append(entry)
        monitor = self._settings.stopping_rule()
        if monitor is not None and monitor.monitor not in entry:
            names = ", ".join(name for name in entry if name not in NAMES or name == "loss")
            raise BadSetting(
                f"early_stopping monitors {monitor.monitor!r}, and the history of epoch {entry['epoch']} has {names}. "
                "Log it in training_step or validation_step (self.log), or name another: EarlyStopping(monitor=…).",
                setting="early_stopping",
            )
        self._early_stopping.on_epoch_end(entry)
        if self._early_stopping.should_stop:
            trainer.should_stop = True
        self._progress.on_epoch_end(self._training.current, entry)
        self.sums, self._validated = Sums(), {}
        self._saved_step = trainer.global_step
        if trainer.should_stop or len(self._history) >= self._settings.epochs:
            self._checkpoint.finish(trainer.global_step)
        else:
            self._checkpoint.save(trainer.global_step)
            self._checkpoint.regroup(trainer.global_step)
        self._began = time.monotonic()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._checkpoint.finish(trainer.global_step)

    # ---- validation

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._stop_clock()
        self._validation = Sums()

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        assert self._validating is not None
        self._validation.add(self._validating.queue.popleft(), _loss_of(outputs))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self._validated = _numbers(trainer.callback_metrics)
        self._began = time.monotonic()

    # ---- an epoch

    def _stop_clock(self) -> None:
        now = time.monotonic()
        self.sums.seconds += now - self._began
        self._began = now

    def _entry(self, trainer: Any) -> dict[str, Any]:
        """Return the entry of this epoch, the same on every rank. A collective call."""
        taken = set(NAMES) - {"loss"}
        logged = {name: value for name, value in _numbers(trainer.callback_metrics).items() if name not in taken}
        every = self._world.gather((self.sums.state(), self._validation.state(), logged, set(self._validated)))
        sums, validation = Sums(), Sums()
        sums.take([one[0] for one in every])
        validation.take([one[1] for one in every])
        sums.seconds = every[0][0][3]
        means = {} if sums.loss is None else {"loss": sums.loss / max(sums.rows, 1)}
        for name in dict.fromkeys(name for one in every for name in one[2] if name not in means):
            rows = [(one[1][0] if name in one[3] else one[0][0], one[2][name]) for one in every if name in one[2]]
            means[name] = sum(count * value for count, value in rows) / max(sum(count for count, _ in rows), 1)
        if validation.loss is not None and validation.rows:
            means["validation_loss"] = validation.loss / validation.rows
        self._validation = Sums()  # Lightning may leave out the validation of an epoch.
        number = trainer.current_epoch + 1
        entry = epoch_entry(number, means, seconds=max(sums.seconds, 1e-9), rows=sums.rows, padded=sums.padded)
        if trainer.optimizers:
            entry["learning_rate"] = float(trainer.optimizers[0].param_groups[0]["lr"])
        return entry


def _loss_of(outputs: Any) -> float | None:
    """Return the loss among the outputs of a step; None where there is none."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    return float(loss) if isinstance(loss, torch.Tensor) and loss.numel() == 1 else None


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers that the module has logged, without those of single steps."""
    kept = {name: value for name, value in metrics.items() if not name.endswith("_step")}
    return {name: float(value) for name, value in kept.items() if getattr(value, "numel", lambda: 1)() == 1}


def diverged(epoch: int, step: int, rank: int) -> TrainingDiverged:
    """Return the error for a loss that is NaN or infinite, of this epoch and step from 0."""
    return TrainingDiverged(
        f"The loss of rank {rank} is NaN or infinite: epoch {epoch + 1}, step {step + 1}. Look for values that are not "
        "finite in the module (the logarithm or quotient of a zero), lower the learning rate, clip the gradients "
        '(trainer_args={"gradient_clip_val": 1.0}), or scale the features.',
        epoch=epoch + 1,
        step=step + 1,
        rank=rank,
        column=None,
    )
