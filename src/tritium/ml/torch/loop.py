"""The training loop with PyTorch (rank)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

# The first optimizer, DDP or FSDP would import it, 1 s of a core in each rank: here once for all that are forked later.
import torch._dynamo

from tritium.checkpoint.training import Collective, Own, Shared, Stateful, TrainingCheckpoint
from tritium.data.steps import has_batch_of_one, step_count
from tritium.errors import BadData, EmptyShard
from tritium.gang.rank.world import World
from tritium.gang.rank.world import world as this_world
from tritium.ml.callbacks import TrainState, at_steps
from tritium.ml.dry_run import try_first_row
from tritium.ml.early_stopping import EarlyStoppingState
from tritium.ml.first_batch import notes
from tritium.ml.history import make_json
from tritium.ml.progress import TrainingProgress
from tritium.ml.torch.checkpoint import TorchWeights, buffers, restore_states, states_of
from tritium.ml.torch.compiling import compile_in_place
from tritium.ml.torch.ddp import Replica, tell_untrained, with_sync_batch_norm
from tritium.ml.torch.divergence import DivergenceCheck
from tritium.ml.torch.dry_run import TorchDryRun, TorchFacts
from tritium.ml.torch.epoch_metrics import EpochMetrics
from tritium.ml.torch.fsdp import ShardedModule
from tritium.ml.torch.identity import identity
from tritium.ml.torch.losses import Losses
from tritium.ml.torch.module import make_module
from tritium.ml.torch.optimizer import OptimizerStep, make_optimizer
from tritium.ml.torch.random_state import random_state, seed_generators, set_random_state
from tritium.ml.torch.ranks import Ranks, joined, refuse_different, take_buffers
from tritium.ml.torch.schedule import Schedule
from tritium.ml.torch.settings import TorchSettings
from tritium.ml.torch.step import Step, StepModule, describe, make_step
from tritium.model.engines.torch_weights import Tensors
from tritium.model.safetensors import pieces

WEIGHTS = "weights.safetensors"


def train(
    settings: TorchSettings,
    validate: bool,
    facts: TorchFacts,
    user_run_dir: bool = False,
    identity_with_code: dict[str, Any] | None = None,
) -> dict[str, Any] | None:
    """Train on this rank's shards. Rank 0 stores the weights, and returns history, inputs and outputs; others None.

    facts : the result of the dry run on the driver.
    user_run_dir : whether the user named the run directory; a training that was begun there then continues.
    identity_with_code : what the driver knows of this training, to be kept in its checkpoints.
    """
    world = this_world()
    with joined(world) as ranks:
        training = _TorchTraining(settings, validate, facts, user_run_dir, identity_with_code, world, ranks)
        return training.run()


class _TorchTraining:
    """A training on this rank, from the settings to the weights."""

    def __init__(
        self,
        settings: TorchSettings,
        validate: bool,
        facts: TorchFacts,
        user_run_dir: bool,
        identity_with_code: dict[str, Any] | None,
        world: World,
        ranks: Ranks,
    ) -> None:
        """Make module, optimizer and what goes with them, and restore a checkpoint's weights."""
        self.settings, self.validates, self.world, self.ranks = settings, validate, world, ranks
        self.tell = world.note if ranks.rank == 0 else lambda _: None
        self.batch_size = batch_size = settings.rows_per_rank(ranks.size)
        if settings.tries and not facts.tried:
            facts = try_first_row(TorchDryRun, settings, world) or facts
        torch.manual_seed(settings.seed)
        self.module = module = made_module(settings, ranks)
        world.expect_file(WEIGHTS, known_bytes(module))
        self.replica = replicated(settings, module, ranks, facts.find_unused_parameters)
        seed_generators(settings, settings.seed + ranks.rank)  # Dropout differs from rank to rank.
        self.optimizer = optimizer = make_optimizer(settings, module)
        self.shard = shard = world.shard("train")
        if facts.alone and settings.shuffle != "stream":
            refuse_batch_of_one(settings, shard.counts, batch_size, facts.alone)
        if validate and settings.shuffle != "stream":  # Rows that still arrive can't be counted yet.
            settings.check_validation_rows(world.shard("validation").counts)
            if is_sharded(settings, ranks):
                refuse_no_rows(world.shard("validation").counts)
        this = identity(settings, module, optimizer, shard.schema)
        self.divergence = DivergenceCheck(
            ranks, shard.schema, settings.precision, transforms=settings.transform is not None
        )
        steps = lambda: step_count(shard.counts, batch_size, settings.remainder)  # noqa: E731
        self.schedule = Schedule(settings, optimizer, steps, self.tell)
        step = make_step(settings, ranks.device, ranks=ranks)
        self.stepping = OptimizerStep(settings, self.replica, optimizer, step, self.divergence)
        self.eval_step = validating_step(settings, self.replica)
        best = (self.replica.copy_of_weights, module.load_state_dict)
        self.early_stopping = EarlyStoppingState(settings.stopping_rule(), settings.epochs, *best, self.tell)
        self.progress = TrainingProgress(settings, world)
        self.state = TrainState(module, optimizer, ranks.rank, ranks.size, ranks.device)
        self.output_known = facts.output_known
        self.inputs: dict[str, tuple[str, list[int]]] = {}
        self.metrics: EpochMetrics | None = None
        self.position = Collective(shard.state)
        self.sums = Collective(lambda: None if self.metrics is None else self.metrics.state())
        identities = {"identity": this, "identity_with_code": identity_with_code}
        about = (self.state.history, self.early_stopping, self._parts())
        self.checkpoint = TrainingCheckpoint(world, settings, identities, *about, run_dir_required=user_run_dir)
        if self.checkpoint.load() is not None:
            self.weights.restore_module(*self.checkpoint.kept("weights"))
            self.state.epoch = len(self.state.history)

    def _parts(self) -> dict[str, Stateful]:
        """Return what a checkpoint keeps of this training, in the order in which it is restored."""
        settings, state, module, schedule = self.settings, self.state, self.module, self.schedule
        rank, size, device = state.rank, state.size, state.device
        scaler, hook = self.stepping.scaler, self.replica.comm_hook
        self.weights = TorchWeights(state, self.replica, self.ranks, self.early_stopping, self.divergence)
        return {
            "weights": self.weights,
            **({} if scaler is None else {"scaler": Shared(scaler.state_dict, scaler.load_state_dict)}),
            "schedule": Shared(
                lambda: {**schedule.state_dict(), "epochs": settings.epochs},
                lambda kept: schedule.load_state_dict(kept, state.history, kept["epochs"]),
            ),
            "inputs": Shared(lambda: self.inputs, self.inputs.update),
            "metrics": self.sums,
            "buffers": Own(  # BatchNorm's statistics differ from rank to rank; rank 0's are in the module's state
                rank,
                lambda: buffers(module) if rank else {},
                lambda kept: module.load_state_dict(kept, strict=False),
                size,
            ),
            "comm_hook": Own(rank, hook.state_dict, lambda kept: hook.load_state_dict(kept, device), size),
            "random": Own(
                rank,
                lambda: random_state(device),
                lambda kept: set_random_state(kept, device),
                missing=lambda: seed_generators(settings, settings.seed + rank + 1000 * self.checkpoint.step),
            ),
            "callbacks": Own(
                rank, lambda: states_of(settings.callbacks), lambda kept: restore_states(settings.callbacks, kept)
            ),
            "position": self.position,
        }

    def run(self) -> dict[str, Any] | None:
        """Take all epochs. Rank 0 stores the weights, and returns history, inputs and outputs; others None."""
        settings, state, checkpoint = self.settings, self.state, self.checkpoint
        for callback in settings.callbacks:
            callback.on_train_start(state)
        self.schedule.on_train_start()
        if checkpoint.restore():
            state.step = checkpoint.step
        else:
            self.replica.refresh(self.optimizer)
        resume = self.position.restored
        tell_untrained(self.module, self.optimizer, self.tell)
        order = settings.order() | {"batch_size": self.batch_size, "device": self.ranks.device, "resume": resume}
        for epoch in self.shard.epochs(checkpoint.rounds, **order):
            self.metrics = metrics = EpochMetrics(settings.named_metrics(), self.ranks, list(settings.label_sources()))
            if self.sums.restored is not None and epoch.first > 0:
                metrics.load_state(self.sums.restored)
            self.sums.restored = None
            self._steps(epoch, metrics)
            self._end_epoch(epoch, metrics)
            self.metrics = None
            if self.ranks.any(state.stop or self.early_stopping.should_stop):
                break
            checkpoint.regroup(state.step)
        checkpoint.finish(state.step)
        self.early_stopping.restore_best()
        for callback in settings.callbacks:
            callback.on_train_end(state)
        for entry in state.history:
            make_json(entry)
        take_buffers(self.module, self.ranks)
        self._refuse_different()
        return self._stored()

    def _steps(self, epoch: Any, metrics: EpochMetrics) -> None:
        """Take the optimizer steps of an epoch."""
        settings, state = self.settings, self.state
        each_step = [callback for callback in settings.callbacks if at_steps(callback)]
        self.schedule.on_epoch_start(epoch)
        self.stepping.on_epoch_start()
        for group in epoch.groups(settings.gradient_accumulation):
            loss = self.stepping.take(group, metrics)
            batches = group.taken  # They have no columns any more.
            self.schedule.on_step()
            state.step, state.loss = state.step + 1, loss
            for callback in each_step:
                callback.on_step_end(state)
            if not self.inputs:
                self.inputs |= inputs_of(settings, batches[-1])
            self.checkpoint.save(state.step)
            if state.step == 1 and state.rank == 0:
                for line in notes(settings, batches[-1], self.module.modules()):
                    self.tell(line)
            if not self.output_known:  # What can't be a prediction must fail now, not after the last epoch.
                self._described()
                self.replica.train()
                self.output_known = True
            self.progress.on_step(epoch, batches, loss)
        self.divergence.check()
        if epoch.number == 0 and settings.verbose:
            tell_one_step(epoch, self.shard.counts, self.batch_size, self.tell)

    def _end_epoch(self, epoch: Any, metrics: EpochMetrics) -> None:
        """Validate, and let schedule, early stopping and callbacks see the epoch's entry in the history."""
        settings, state, ranks = self.settings, self.state, self.ranks
        entry = metrics.entry(epoch.number + 1)
        take_buffers(self.module, ranks)  # The returned model has rank 0's, so all ranks validate with those.
        if self.validates:
            shard = self.world.shard("validation")
            if self.replica.sharded:
                refuse_no_rows(shard.counts)
            entry |= validation(shard, self.batch_size, self.module, self.eval_step, settings, ranks)
            take_buffers(self.module, ranks)  # Those of observers and counters change in eval mode, too.
        entry |= {"learning_rate": self.schedule.learning_rate(), **self.stepping.entry(epoch, self.tell)}
        state.epoch = entry["epoch"]
        state.history.append(entry)
        self.schedule.on_epoch_end(entry)
        self.early_stopping.on_epoch_end(entry)
        for callback in settings.callbacks:
            callback.on_epoch_end(state)
        make_json(state.history[-1])
        self.replica.refresh(self.optimizer)
        self._refuse_different()
        self.progress.on_epoch_end(epoch, entry)

    def _refuse_different(self) -> None:
        if self.settings.equal_weights:
            refuse_different(self.module, self.ranks)

    def _described(self) -> dict[str, Any]:
        """Return inputs and outputs of the module, as `describe` does. A collective call where it is sharded."""
        batch = {
            name: torch.zeros((2, *shape), dtype=getattr(torch, dtype), device=self.state.device)
            for name, (dtype, shape) in self.inputs.items()
        }
        if not self.replica.sharded:
            return describe(self.module, self.settings, batch)
        with torch.no_grad():
            return self.replica.call(lambda module, batch: describe(module, self.settings, batch), batch)

    def _stored(self) -> dict[str, Any] | None:
        """Store the weights and return what `train` does."""
        if self.replica.sharded:
            described, state = self._described(), self.replica.whole_weights()
        elif self.ranks.rank == 0:
            described, state = self._described(), self.module.state_dict(keep_vars=True)
        if self.ranks.rank != 0:
            return None
        self.world.store(WEIGHTS, pieces(Tensors.of_state(state).stream()))
        return {"history": self.state.history, **described}


def inputs_of(settings: TorchSettings, batch: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, list[int]]]:
    """Return dtype and row shape of the inputs in a batch, by name."""
    return {
        name: (str(batch[name].dtype).removeprefix("torch."), list(batch[name].shape[1:])) for name in settings.inputs()
    }


def made_module(settings: TorchSettings, ranks: Ranks) -> torch.nn.Module:
    """Return a new module, on the rank's device but where it will be sharded, which moves a part at a time."""
    module = make_module(settings)
    if not is_sharded(settings, ranks):
        module = module.to(ranks.device)
    module = with_sync_batch_norm(module, settings.ddp_options, ranks)
    compile_in_place(module, settings.compile, ranks.device)
    return module


def is_sharded(settings: TorchSettings, ranks: Ranks) -> bool:
    """Return whether each rank holds a part of the weights only."""
    return settings.strategy == "fsdp" and ranks.size > 1


def replicated(
    settings: TorchSettings, module: torch.nn.Module, ranks: Ranks, find_unused_parameters: bool
) -> Replica | ShardedModule:
    """Return the module on all ranks, by DDP or FSDP."""
    if is_sharded(settings, ranks):
        return ShardedModule(module, ranks)
    stepping = None if settings.train_step is None else lambda module: StepModule(module, settings)
    return Replica(module, ranks, find_unused_parameters, settings.ddp_options, stepping)


def validating_step(settings: TorchSettings, replica: Replica | ShardedModule) -> Step:
    """Return the function (module, batch) -> (mean loss over the batch's rows, output) for validation."""
    step = make_step(settings, replica.device, validates=True)
    return (lambda _, batch: replica.call(step, batch)) if replica.sharded else step


def tell_one_step(epoch: Any, counts: Sequence[int], batch_size: int, tell: Callable[[str], Any]) -> None:
    """Tell the user when an epoch is one step, as a batch is larger than the rows of a rank."""
    if epoch.steps == 1 and max(counts) < batch_size:
        tell(
            f"an epoch is one step: batch_size={batch_size:,} is more than the {max(counts):,} rows of a rank. "
            "A smaller one takes more steps"
        )


def known_bytes(module: torch.nn.Module) -> int:
    """Return the bytes of the parameters whose shape is known before the first batch."""
    return sum(value.nbytes for value in module.parameters() if not torch.nn.parameter.is_lazy(value))


def validation(
    shard: Any,
    batch_size: int,
    module: torch.nn.Module,
    step: Step,
    settings: TorchSettings,
    ranks: Ranks,
) -> dict[str, Any]:
    """Return loss and metrics over the validation rows of all ranks, under names that begin with `validation_`.

    A rank without such rows takes no step. Raises EmptyShard where no rank has any.
    """
    settings.check_validation_rows(shard.counts)
    losses = None if settings.has_own_step() or settings.eval_step is not None else Losses(settings)
    over_weights = losses if losses is not None and losses.over_weights else None
    metrics = EpochMetrics(settings.named_metrics(), ranks, list(settings.label_sources()), over_weights)
    uneven = 0 in shard.counts  # Then each rank takes its own number of steps, and some take none.
    module.eval()
    with torch.no_grad():
        rows = shard.alone() if uneven else shard
        order = {"batch_size": batch_size, "shuffle": False, "remainder": "pad", "device": ranks.device}
        for epoch in rows.epochs(1, **order) if shard.rows else ():
            for batch in epoch:
                metrics.add(batch, *step(module, batch))
    return {f"validation_{name}": value for name, value in metrics.means(uneven=uneven).items()}


def refuse_batch_of_one(settings: Any, counts: Sequence[int], batch_size: int, failure: str) -> None:
    """Raise BadData, the same on every rank, where an epoch has a batch of one row, with which the module fails."""
    if has_batch_of_one(counts, batch_size, settings.remainder):
        raise BadData(
            f"An epoch has a batch of one row (rows per rank: {', '.join(map(str, counts[:64]))}; batch_size="
            f"{batch_size}), with which the model can't be trained: {failure}. "
            + (
                "Give a larger batch_size."
                if batch_size == 1
                else "Give another batch_size, or leave that batch out: remainder='drop'."
            ),
            counts=list(counts),
        )


def refuse_no_rows(counts: Sequence[int]) -> None:
    """Raise EmptyShard, the same on every rank, where one has no row to validate on: a sharded module needs all."""
    if 0 in counts:
        raise EmptyShard(
            f"strategy='fsdp' validates on all ranks together, and rank {counts.index(0)} has no row to validate on "
            f"(rows per rank: {', '.join(map(str, counts[:64]))}). Give more rows to validate on, or take "
            "strategy='ddp'.",
            counts=list(counts),
        )
