"""Training with a Trainer of Lightning's (rank)."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning
import torch

from tritium.checkpoint.training import TrainingCheckpoint
from tritium.gang.rank.world import World
from tritium.gang.rank.world import world as this_world
from tritium.ml.dry_run import try_first_row
from tritium.ml.early_stopping import EarlyStoppingState
from tritium.ml.first_batch import notes
from tritium.ml.lightning.batches import Batches, loader
from tritium.ml.lightning.callback import TrainerCallback
from tritium.ml.lightning.checkpoint import LightningFile, taken, weights_in
from tritium.ml.lightning.dry_run import LightningDryRun, LightningFacts
from tritium.ml.lightning.identity import identity
from tritium.ml.lightning.module import make_module
from tritium.ml.lightning.settings import LightningSettings
from tritium.ml.torch.loop import WEIGHTS, known_bytes, refuse_batch_of_one
from tritium.ml.torch.ranks import copy_of_weights
from tritium.ml.torch.step import describe
from tritium.model.engines.torch_weights import Tensors
from tritium.model.safetensors import pieces

__all__ = ["WEIGHTS", "train"]


def train(
    settings: LightningSettings,
    validate: bool,
    facts: LightningFacts,
    user_run_dir: bool = False,
    identity_with_code: dict[str, Any] | None = None,
) -> dict[str, Any] | None:
    """Train on this rank's shards. Rank 0 stores the weights, and returns history, inputs and outputs; others None.

    facts        : the result of the dry run on the driver.
    user_run_dir : whether the user named the run directory; a training that was begun there then continues.
    identity_with_code : the driver's description of this training, to be kept in its checkpoints.
    """
    world = this_world()
    device = torch.device(world.device)
    gpus = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus), quieter():
        if settings.tries and not facts.tried:
            facts = try_first_row(LightningDryRun, settings, world) or facts
        if facts.alone:
            batch_size = settings.rows_per_rank(world.size)
            refuse_batch_of_one(settings, world.shard("train").counts, batch_size, facts.alone)
        return _train(settings, validate, user_run_dir, identity_with_code, world, device)


def _train(
    settings: LightningSettings,
    validate: bool,
    user_run_dir: bool,
    identity_with_code: dict[str, Any] | None,
    world: World,
    device: torch.device,
) -> dict[str, Any] | None:
    tell = world.note if world.rank == 0 else lambda _: None
    torch.manual_seed(settings.seed)
    module = make_module(settings)
    world.expect_file(WEIGHTS, known_bytes(module))
    torch.manual_seed(settings.seed + world.rank)  # Dropout must differ from rank to rank.
    shard = world.shard("train")
    training = Batches(settings, shard, world.size, device, **order(settings))
    validating = validation(settings, world, device) if validate else None
    rule = settings.stopping_rule()
    take_weights, put_weights = lambda: copy_of_weights(module), module.load_state_dict
    early_stopping = EarlyStoppingState(rule, settings.epochs, take_weights, put_weights, tell)
    file, history = LightningFile(world), list[dict[str, Any]]()
    identities = {"identity": identity(settings, module, shard.schema), "identity_with_code": identity_with_code}
    about = (history, early_stopping, file.parts(early_stopping, device))
    checkpoint = TrainingCheckpoint(world, settings, identities, *about, run_dir_required=user_run_dir)
    path = None if checkpoint.load() is None else file.write(*checkpoint.kept("lightning"))
    if checkpoint.finished and path is not None:
        module.load_state_dict(weights_in(taken(path)))
        early_stopping.load_weights(checkpoint.kept("best")[0])
        next(iter(training))  # The first batch shows the types and shapes of the inputs.
    else:
        if path is None and world.rank == 0:
            training.on_first = lambda batch: [*map(tell, notes(settings, batch, module.modules()))]
        together = TrainerCallback(settings, world, training, validating, early_stopping, checkpoint, file, history)
        trainer = lightning.Trainer(**arguments(settings, together, world))
        with calling(module, together):
            resume: dict[str, Any] = {} if path is None else {"ckpt_path": path} | _whole_file()
            later = None if validating is None else loader(validating)
            trainer.fit(module, loader(training), later, **resume)
        module._trainer = None
    early_stopping.restore_best()
    if world.rank != 0:
        return None
    module.cpu()
    world.store(WEIGHTS, pieces(Tensors.of(module).stream()))
    zeros = {
        name: torch.zeros((2, *shape), dtype=getattr(torch, dtype)) for name, (dtype, shape) in training.inputs.items()
    }
    return {"history": history, **describe(module, settings, zeros)}


def order(settings: LightningSettings) -> dict[str, Any]:
    """Return the arguments of `Batches` that decide the order of the rows to train on."""
    return {"shuffle": settings.shuffle, "seed": settings.seed, "remainder": settings.remainder}


def validation(settings: LightningSettings, world: World, device: torch.device) -> Batches:
    """Return the rows to validate on, in order. Raises EmptyShard where there are none."""
    shard = world.shard("validation")
    settings.check_validation_rows(shard.counts)
    return Batches(settings, shard, world.size, device, shuffle=False, seed=0, remainder="pad")


def arguments(settings: LightningSettings, together: TrainerCallback, world: World) -> dict[str, Any]:
    """Return the arguments of the Trainer: the user's, but those that are the estimator's own."""
    of_user: Mapping[str, Any] = settings.trainer_args or {}
    defaults: dict[str, Any] = {
        "logger": False,
        "num_sanity_val_steps": 0,
        "enable_model_summary": False,
    }
    if world.size == 1:
        defaults |= {"devices": 1, "accelerator": "gpu" if world.device.startswith("cuda") else "cpu"}
    return {
        **defaults,
        **of_user,
        "max_epochs": settings.epochs,
        "callbacks": [*settings.callbacks, together],
        "enable_progress_bar": False,
    }


@contextmanager
def quieter() -> Iterator[None]:
    """Within the block, leave out Lightning's advertisements, and warnings about Tritium's own use of it."""
    log = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    before = log.level
    log.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Your `IterableDataset` has `__len__` defined")
            warnings.filterwarnings("ignore", "You defined a `validation_step` but have no `val_dataloader`")
            warnings.filterwarnings("ignore", "It is recommended to use `self.log")  # Logs are averaged here.
            warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning)
            yield
    finally:
        log.setLevel(before)


@contextmanager
def calling(module: Any, together: TrainerCallback) -> Iterator[None]:
    """Within the block, let Lightning compute gradients by `Together.backward`."""
    module.backward = partial(together.backward, module.backward)
    try:
        yield
    finally:
        del module.backward


def _whole_file() -> dict[str, Any]:
    """Return the argument by which newer versions of Lightning read a checkpoint with other things than tensors."""
    import inspect

    has = "weights_only" in inspect.signature(lightning.Trainer.fit).parameters
    return {"weights_only": False} if has else {}
