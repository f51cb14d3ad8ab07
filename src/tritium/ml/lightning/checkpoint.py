"""The training checkpoint: Lightning's own, kept by the run directory's rules (rank)."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import fsspec  # type: ignore[import-untyped]
import torch

from tritium.checkpoint.identity import refuse_another
from tritium.errors import BadSetting
from tritium.gang.rank.world import World
from tritium.ml.early_stopping import EarlyStoppingState, stays_stopped
from tritium.ml.lightning.settings import LightningSettings
from tritium.ml.torch.random_state import random_state, set_random_state


@dataclass
class Training:
    """What a checkpoint holds the state of, beside the Trainer."""

    settings: LightningSettings
    world: World
    device: torch.device
    early_stopping: EarlyStoppingState
    identity: dict[str, Any]
    identity_with_code: dict[str, Any] | None
    history: list[dict[str, Any]] = field(default_factory=list)


class TrainingCheckpoint:
    """The state of a training, saved as often as the settings say, and restored from an earlier attempt or run.

    `run_dir_required`: the user named the run directory, so it is an error when a rank does not reach it. Otherwise a
    training whose ranks do not share a disk runs without checkpoints, and logs that.
    """

    def __init__(self, training: Training, *, run_dir_required: bool) -> None:
        self._training, self._settings, self._world = training, training.settings, training.world
        self._on, self._run_dir_required = self._settings.checkpoint_every is not None, run_dir_required
        self._file = f"memory://tritium-lightning-{self._world.run_id}.ckpt"
        """Lightning's checkpoint on its way from and to the run directory: of this process alone, and gone with it."""
        self._saved: Any = None
        self._resized = False
        self._stopped = False
        self.finished = False
        """Whether nothing is left to train."""
        self._final = False

    def load(self) -> str | None:
        """Read the newest checkpoint, restore the history, and return Lightning's file, which `put_back` removes.

        None without a checkpoint.

        A collective call. Raises BadSetting for the checkpoint of another training.
        """
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
        training = self._training
        refuse_another(saved.get("identity"), training.identity, saved.path, resized=saved.size != self._world.size)
        training.history[:] = saved["history"]
        training.early_stopping.load_state_dict(saved["early_stopping"], len(training.history))
        self._stopped = stays_stopped(saved["stopped"], saved["early_stopping"], self._settings.stopping_rule())
        done = len(training.history)
        self.finished = saved["finished"] and (self._stopped or done >= self._settings.epochs)
        self._saved = saved
        content = saved["lightning"].numpy().tobytes()
        self._resized = saved.size != self._world.size
        if saved["within"] and self._resized:
            content = started_over(content)  # as its rows are, which the ranks are dealt anew
        with fsspec.open(self._file, "wb") as file:
            file.write(content)
        return self._file

    def put_back(self, sums: Any) -> None:
        """Restore random generators and the sums of an epoch that continues, after all callbacks have begun."""
        saved, self._saved = self._saved, None
        if saved is None:
            return
        taken(self._file)
        own = saved.own
        if self._resized:
            return
        set_random_state(own[self._world.rank]["random"], self._training.device)
        if self._world.rank == 0:
            sums.take([one["sums"] for one in own])

    def on_step(self, trainer: Any, sums: Any) -> None:
        """Save within an epoch, when `checkpoint_every` says so."""
        if self._on:
            self._save(trainer, sums, every=self._settings.checkpoint_every)

    def on_epoch_end(self, trainer: Any) -> None:
        """Save between two epochs, when `checkpoint_every` says so or the gang could be larger; after the last one."""
        done = len(self._training.history)
        if not self._on:
            return
        if trainer.should_stop or done >= self._settings.epochs:
            self._save_final(trainer)
            return
        self._save(trainer, None, every=self._settings.checkpoint_every)
        keep = self._settings.checkpoint_keep
        self._world.checkpoint.regroup(
            self._state(trainer, within=False), trainer.global_step, own=self._own(None), keep=keep
        )

    def on_train_end(self, trainer: Any) -> None:
        """Save after a limit of the Trainer's has ended the training, such as max_time."""
        if self._on:
            self._save_final(trainer)

    def _save_final(self, trainer: Any) -> None:
        if self._run_dir_required and not self._final:
            self._final = True
            self._stopped = len(self._training.history) < self._settings.epochs
            self._save(trainer, None, every=None)

    def _save(self, trainer: Any, sums: Any, *, every: Any) -> None:
        state = self._state(trainer, within=sums is not None)
        keep = self._settings.checkpoint_keep
        self._world.checkpoint.save(state, trainer.global_step, own=self._own(sums), every=every, keep=keep)

    def _state(self, trainer: Any, *, within: bool) -> Callable[[], dict[str, Any]]:
        training = self._training

        def state() -> dict[str, Any]:
            trainer.save_checkpoint(self._file, weights_only=False)  # every rank calls it, rank 0 writes
            content = bytearray(taken(self._file) if self._world.rank == 0 else b"")
            return {
                "identity": training.identity,
                "identity_with_code": training.identity_with_code,
                "lightning": torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0),
                "within": within,
                "early_stopping": training.early_stopping.state_dict(),
                "epochs": self._settings.epochs,
                "history": training.history,
                "finished": self._final,
                "stopped": self._stopped,
            }

        return state

    def _own(self, sums: Any) -> Callable[[], dict[str, Any]]:
        def own() -> dict[str, Any]:
            nothing = [0, 0, None, 0.0]
            return {
                "random": random_state(self._training.device),
                "sums": nothing if sums is None else sums.state(),
            }

        return own


def taken(path: str) -> bytes:
    """Return Lightning's file, which is in memory, and remove it."""
    files = fsspec.filesystem("memory")
    content: bytes = files.cat_file(path)
    files.rm(path)
    return content


def weights_in(content: bytes) -> dict[str, torch.Tensor]:
    """Return the weights in a file of Lightning's."""
    found: dict[str, torch.Tensor] = _read(content)["state_dict"]
    return found


def started_over(content: bytes) -> bytes:
    """Return a file of Lightning's that was saved within an epoch, with its weights at the first batch of that."""
    checkpoint = _read(content)
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    progress["current"] = dict.fromkeys(progress["current"], 0)
    progress["total"]["completed"] = progress["total"]["processed"]
    progress["is_last_batch"] = False
    file = io.BytesIO()
    torch.save(checkpoint, file)
    return file.getvalue()


def _read(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=False)
