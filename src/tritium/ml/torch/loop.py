"""The training loop with PyTorch (rank)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from tritium.data.remainder import step_count
from tritium.errors import EmptyShard
from tritium.gang.rank.world import World
from tritium.gang.rank.world import world as this_world
from tritium.ml.callbacks import TrainState, at_steps
from tritium.ml.early_stopping import EarlyStoppingState
from tritium.ml.history import make_json
from tritium.ml.progress import Progress
from tritium.ml.torch.checkpoint import TrainingCheckpoint
from tritium.ml.torch.compiling import compile_in_place
from tritium.ml.torch.ddp import Ranks, Replica, joined, tell_untrained, with_sync_batch_norm
from tritium.ml.torch.divergence import DivergenceCheck
from tritium.ml.torch.dry_run import Facts
from tritium.ml.torch.epoch_metrics import EpochMetrics
from tritium.ml.torch.equal_weights import refuse_different, take_buffers
from tritium.ml.torch.identity import identity
from tritium.ml.torch.module_settings import ModuleSettings
from tritium.ml.torch.optimizer_step import OptimizerStep
from tritium.ml.torch.random_state import seed_generators
from tritium.ml.torch.schedule import Schedule
from tritium.ml.torch.settings import TorchSettings
from tritium.ml.torch.several_steps import Replicas, SeveralSteps, validating_step
from tritium.ml.torch.step import OwnStep, Step, describe, make_step
from tritium.model.engines.torch_weights import Tensors

WEIGHTS = "weights.safetensors"
_PIECE = 4 << 20


def train(
    settings: TorchSettings,
    validate: bool,
    facts: Facts,
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
        if settings.train_step is not None and not settings.steps_by_optimizer():
            ranks.stepping = lambda module: OwnStep(module, settings)
        return _train(settings, validate, facts, user_run_dir, identity_with_code, world, ranks)


def _train(
    settings: TorchSettings,
    validate: bool,
    facts: Facts,
    user_run_dir: bool,
    identity_with_code: dict[str, Any] | None,
    world: World,
    ranks: Ranks,
) -> dict[str, Any] | None:
    batch_size = settings.rows_per_rank(ranks.size)
    tell = world.note if ranks.rank == 0 else lambda _: None
    torch.manual_seed(settings.seed)
    module = with_sync_batch_norm(settings.make_module().to(ranks.device), settings.ddp_options, ranks)
    unused = facts.find_unused_parameters
    compile_in_place(module, settings.compile, ranks.device)
    one = None if settings.steps_by_optimizer() else Replica(module, ranks, unused, settings.ddp_options)
    world.expect_file(WEIGHTS, known_bytes(module))
    seed_generators(settings, settings.seed + ranks.rank)  # dropout differs from rank to rank
    optimizer = settings.make_optimizer(module)
    shard = world.shard("train")
    if validate and settings.shuffle != "stream":  # rows that still arrive can't be counted yet
        check_some_rows(world.shard("validation").counts, settings)
    this = identity(settings, module, optimizer, shard.schema)
    whole = lambda: step_count(shard.counts, batch_size, settings.remainder)  # noqa: E731
    divergence, schedule = (
        DivergenceCheck(ranks, shard.schema, settings.precision, transforms=settings.transform is not None),
        Schedule(settings, optimizer, whole, tell),
    )
    replica, stepping, eval_step = steps_of(settings, ranks, one, module, optimizer, divergence)
    take_weights, put_weights = lambda: copy_of_weights(module), module.load_state_dict
    early_stopping = EarlyStoppingState(settings.stopping_rule(), settings.epochs, take_weights, put_weights, tell)
    progress = Progress(settings, world)
    state = TrainState(module, optimizer, ranks.rank, ranks.size, ranks.device)
    checkpoint = TrainingCheckpoint(
        *(
            settings,
            world,
            shard,
            state,
            replica,
            stepping,
            divergence,
            schedule,
            early_stopping,
            this,
            identity_with_code,
        ),
        run_dir_required=user_run_dir,
    )
    checkpoint.load()
    for callback in settings.callbacks:
        callback.on_train_start(state)
    each_step = [callback for callback in settings.callbacks if at_steps(callback)]
    resume, output_known = checkpoint.put_back(), facts.output_known
    tell_untrained(module, optimizer, tell)
    order = settings.order() | {"batch_size": batch_size, "device": ranks.device, "resume": resume}
    for epoch in shard.epochs(checkpoint.epochs, **order):
        metrics = checkpoint.epoch_metrics(epoch, ranks)
        schedule.on_epoch_start(epoch)
        stepping.on_epoch_start()
        for group in epoch.groups(settings.gradient_accumulation):
            loss, batches = stepping.take(group, metrics), group.taken  # the batches without their columns
            schedule.on_step()
            state.step, state.loss = state.step + 1, loss
            for callback in each_step:
                callback.on_step_end(state)
            checkpoint.on_step(batches[-1], metrics)
            if not output_known:  # an output that can't be a prediction must fail now, not after the last epoch
                describe(module, settings, checkpoint.example())
                replica.train()
                output_known = True
            progress.on_step(epoch, batches, loss)
        divergence.check()
        if epoch.number == 0 and settings.verbose:
            tell_one_step(epoch, shard.counts, batch_size, tell)
        entry = metrics.entry(epoch.number + 1)
        take_buffers(module, ranks)  # the returned model has rank 0's, so all ranks validate with those
        if validate:
            losses = stepping.losses if settings.eval_step is None else []
            entry |= validation(world.shard("validation"), batch_size, module, eval_step, settings, ranks, losses)
            take_buffers(module, ranks)  # those of observers and counters change in eval mode, too
        entry |= {"learning_rate": schedule.learning_rate(), **stepping.entry(epoch, tell)}
        state.epoch = entry["epoch"]
        state.history.append(entry)
        schedule.on_epoch_end(entry)
        early_stopping.on_epoch_end(entry)
        for callback in settings.callbacks:
            callback.on_epoch_end(state)
        make_json(state.history[-1])
        replica.refresh(optimizer)
        refuse_different(module, ranks, tell)
        progress.on_epoch_end(epoch, entry)
        if ranks.any(state.stop or early_stopping.should_stop):
            break
        checkpoint.on_epoch_end()
    checkpoint.on_train_end()
    early_stopping.restore_best()
    for callback in settings.callbacks:
        callback.on_train_end(state)
    for entry in state.history:
        make_json(entry)
    take_buffers(module, ranks)
    refuse_different(module, ranks, tell)
    if ranks.rank != 0:
        return None
    world.store(WEIGHTS, pieces(Tensors.of(module).stream()))
    return {"history": state.history, **describe(module, settings, checkpoint.example())}


def steps_of(
    settings: TorchSettings, ranks: Ranks, one: Replica | None, module: Any, optimizer: Any, divergence: DivergenceCheck
) -> tuple[Replica | Replicas, OptimizerStep | SeveralSteps, Step]:
    """Return the module on all ranks, the steps of its optimizer, or of several, and the step for validation.

    `one`: the module on all ranks, where it has one optimizer.
    """
    eval_step = make_step(settings, ranks.device, validates=True)
    if one is None:
        replicas = Replicas(settings, ranks, module, optimizer)
        if settings.eval_step is None:
            eval_step = validating_step(settings, optimizer, ranks.device)
        return replicas, SeveralSteps(settings, replicas, optimizer, divergence), eval_step
    step = make_step(settings, ranks.device)
    return one, OptimizerStep(settings, one, optimizer, step, divergence), eval_step


def tell_one_step(epoch: Any, counts: Sequence[int], batch_size: int, tell: Callable[[str], Any]) -> None:
    """Tell the user when an epoch is one step, as a batch is larger than the rows of a rank."""
    if epoch.steps == 1 and max(counts) < batch_size:
        tell(
            f"an epoch is one step: batch_size={batch_size:,} is more than the {max(counts):,} rows of a rank. "
            "A smaller one takes more steps"
        )


def copy_of_weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of the module's weights and buffers on the CPU."""
    return {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}


def known_bytes(module: torch.nn.Module) -> int:
    """Return the bytes of the parameters whose shape is known before the first batch."""
    return sum(value.nbytes for value in module.parameters() if not torch.nn.parameter.is_lazy(value))


def pieces(views: Iterable[memoryview]) -> Iterator[bytes]:
    """Yield pieces of at most 4 MiB for `world.store`, without a second copy of the weights."""
    for view in views:
        for start in range(0, len(view), _PIECE):
            yield bytes(view[start : start + _PIECE])


def validation(
    shard: Any,
    batch_size: int,
    module: torch.nn.Module,
    step: Step,
    settings: TorchSettings,
    ranks: Ranks,
    losses: Sequence[str] = (),
) -> dict[str, Any]:
    """Return loss and metrics over the validation rows of all ranks, under names that begin with `validation_`.

    A rank without such rows takes no step. Raises EmptyShard where no rank has any.
    """
    check_some_rows(shard.counts, settings)
    metrics = EpochMetrics(settings.named_metrics(), ranks, list(settings.label_sources()), losses)
    uneven = 0 in shard.counts  # then each rank takes its own number of steps, some none
    module.eval()
    with torch.no_grad():
        rows = shard.alone() if uneven else shard
        order = {"batch_size": batch_size, "shuffle": False, "remainder": "pad", "device": ranks.device}
        for epoch in rows.epochs(1, **order) if shard.rows else ():
            for batch in epoch:
                metrics.add(batch, *step(module, batch))
    return {f"validation_{name}": value for name, value in metrics.means(uneven=uneven).items()}


def check_some_rows(counts: Sequence[int], settings: ModuleSettings) -> None:
    """Raise EmptyShard where there are no rows to validate on, with the same text on every rank."""
    if not any(counts):
        fix = "Give a larger fraction" if isinstance(settings.validation, float) else "Look at what it holds"
        raise EmptyShard(
            f"There are no rows to validate on: validation={settings.validation!r} gives none (rows per rank: "
            f"{', '.join(map(str, counts[:64]))}). {fix}, or validation=None.",
            counts=list(counts),
        )
