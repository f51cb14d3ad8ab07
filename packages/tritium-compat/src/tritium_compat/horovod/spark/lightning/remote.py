"""The training of `horovod.spark.lightning` by Lightning's Trainer (rank)."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from tritium.errors import TrainingDiverged
from tritium_compat.horovod.spark.common.training import Rank, Rows
from tritium_compat.horovod.spark.common.util import to_list
from tritium_compat.horovod.spark.lightning.old_hooks import old_callbacks, with_epoch_ends
from tritium_compat.horovod.spark.torch.modules import loaded, optimizer_for, saved, unpacked

PACKAGES = ("pytorch_lightning", "lightning.pytorch")
_GONE = (
    "gpus",
    "progress_bar_refresh_rate",
    "reload_dataloaders_every_epoch",
    "terminate_on_nan",
    "checkpoint_callback",
)


def package_of(module: Any) -> str | None:
    """Return which of Lightning's packages a LightningModule is of; None for any other module."""
    homes = [base.__module__ for base in type(module).__mro__ if base.__name__ == "LightningModule"]
    return next((name for name in PACKAGES for home in homes if home.startswith(f"{name}.")), None)


def train(rank: Rank, module: bytes, optimizer: bytes | None, checkpoint: bytes | None) -> Any:
    """Train, and return on rank 0 the state that is the model's, and the values that were logged last."""
    settings, own = rank.settings, unpacked(module)
    if settings.random_seed is not None:
        torch.manual_seed(settings.random_seed)
    package = package_of(own) or "lightning.pytorch"
    pl: Any = importlib.import_module(package)
    whole = with_epoch_ends(own)
    if optimizer is not None:
        whole = legacy_module(pl, own, unpacked(optimizer), rank)
    if checkpoint is not None:
        rank.note("the training continues from the weights of the checkpoint of its run_id")
        whole.load_state_dict(loaded(checkpoint)["state_dict"])
    with rank.store.get_local_output_dir() as directory:
        callbacks, keeper = with_checkpoint(pl, rank, directory)
        trainer = pl.Trainer(**arguments(pl, rank, directory, callbacks))
        training = loader(rank, "train", rank.steps(math.floor))
        later = loader(rank, "validation", rank.steps(math.floor, "validation")) if rank.validates else None
        trainer.fit(whole, training, later)
        if not rank.is_first:
            return None
        if rank.store.saving_runs:
            rank.store.sync(directory)
        if keeper is not None and keeper.best_model_path:
            whole.load_state_dict(torch.load(keeper.best_model_path, weights_only=False)["state_dict"])
    weights = {name: value.cpu() for name, value in own.state_dict().items()}
    logged = {name: float(value) for name, value in trainer.logged_metrics.items()}
    return logged, saved({"model": weights})


class Steps(IterableDataset[Rows]):
    """A number of batches in each epoch: tensors by column, as they are in the DataFrame."""

    def __init__(self, rows: Iterator[Rows], steps: int) -> None:
        self._rows, self._steps = rows, steps

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self._steps):
            yield {name: torch.tensor(values) for name, values in next(self._rows).items()}


def loader(rank: Rank, name: str, steps: int) -> Any:
    """Return the loader of the rows to train on, or to validate on."""
    rows = rank.train_rows() if name == "train" else rank.validation_rows()
    return DataLoader(Steps(rows, steps), batch_size=None)


def with_checkpoint(pl: Any, rank: Rank, directory: str) -> tuple[list[Any], Any]:
    """Return the callbacks, and the user's ModelCheckpoint, by which the model is chosen; None without one."""
    callbacks, name = list(rank.settings.callbacks), rank.store.checkpoint_filename
    keepers = [one for one in callbacks if isinstance(one, pl.callbacks.ModelCheckpoint)]
    for one in keepers[:1]:
        one.dirpath, one.filename = directory, name
    added = [] if keepers else [pl.callbacks.ModelCheckpoint(dirpath=directory, filename=name)]
    old = old_callbacks(pl.Callback, list(callbacks))
    checks = [nan_check(pl)] if rank.settings.terminate_on_nan else []
    upload = [uploading(pl, rank, directory)] if rank.is_first and rank.store.saving_runs else []
    return [*callbacks, *added, old, *checks, *upload], keepers[0] if keepers else None


def uploading(pl: Any, rank: Rank, directory: str) -> Any:
    """Return a callback that brings the local directory to the store after each epoch."""

    class Upload(pl.Callback):  # type: ignore[misc]
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            rank.store.sync(directory)

    return Upload()


def nan_check(pl: Any) -> Any:
    """Return a callback that ends the training where the loss is NaN or infinite."""

    class Check(pl.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs
            if loss is not None and not torch.isfinite(loss).all():
                raise TrainingDiverged(
                    f"terminate_on_nan: the loss of step {batch_idx} in epoch {trainer.current_epoch} is {float(loss)}."
                )

    return Check()


def arguments(pl: Any, rank: Rank, directory: str, callbacks: list[Any]) -> dict[str, Any]:
    """Return the arguments of the Trainer; `trainer_args` change them, but for those that Lightning 2 no longer has."""
    settings, logs = rank.settings, os.path.join(directory, rank.store.logs_subdir)
    os.makedirs(logs, exist_ok=True)
    mine = {
        "callbacks": callbacks,
        "max_epochs": settings.epochs,
        "logger": logger(pl, settings.logger, logs) if rank.is_first else settings.logger or False,
        "log_every_n_steps": settings.log_every_n_steps,
        "num_sanity_val_steps": 0,
        "profiler": settings.profiler,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
    }
    if not settings.use_gpu or settings.num_gpus == 0 or not rank.world.device.startswith("cuda"):
        mine["accelerator"] = "cpu"
    if rank.world.size == 1:
        mine["devices"] = 1
    given = {name: value for name, value in (settings.trainer_args or {}).items() if name not in _GONE}
    if given.get("accelerator") == "horovod":
        del given["accelerator"]
    return {**mine, **given}


def logger(pl: Any, given: Any, path: str) -> Any:
    """Return the logger: the user's, else TensorBoard's, or a CSV file where TensorBoard is not installed."""
    if given is not None:
        if hasattr(given, "_save_dir"):
            given._save_dir = path
        return given
    try:
        return pl.loggers.TensorBoardLogger(path)
    except ModuleNotFoundError:
        return pl.loggers.CSVLogger(path)


def legacy_module(pl: Any, module: Any, optimizer: Any, rank: Rank) -> Any:
    """Return a LightningModule that trains a plain module with an optimizer and losses."""
    settings = rank.settings
    kind, groups, state = optimizer
    losses = to_list(settings.loss, len(settings.label_cols)) or []
    weights = settings.loss_weights or [1.0 / len(losses)] * len(losses)

    class Legacy(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self._model = module

        def forward(self, **inputs: Any) -> Any:
            return self._model(**inputs)

        def configure_optimizers(self) -> Any:
            return optimizer_for(self._model, kind, groups, state)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self._loss(batch)
            self.log("train_loss", loss)
            return loss

        def _loss(self, batch: Any) -> Any:
            outputs = self(**{name: batch[name].float() for name in settings.feature_cols})
            outputs = list(outputs) if isinstance(outputs, list | tuple) else [outputs]
            rows = batch[settings.sample_weight_col].float() if settings.sample_weight_col else None
            total: Any = 0.0
            for name, output, loss, weight in zip(settings.label_cols, outputs, losses, weights, strict=True):
                label = batch[name].float()
                label = label.reshape(output.shape) if label.numel() == output.numel() else label
                if rows is None:
                    total = total + loss(output, label) * weight
                else:
                    total = total + (loss(output, label, reduction="none").flatten() * rows).mean() * weight
            return total

    def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), sync_dist=True)

    if settings.validation:
        Legacy.validation_step = validation_step
    return Legacy()
