"""The training loop (rank)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from tritium.data.epoch import Group
from tritium.data.policy import step_count
from tritium.errors import EmptyShard
from tritium.gang.rank.world import World
from tritium.gang.rank.world import world as this_world
from tritium.ml.callbacks import TrainState
from tritium.ml.settings import TorchSettings
from tritium.ml.torch.checkpoint import Keeper
from tritium.ml.torch.ddp import Replica, tell_untrained
from tritium.ml.torch.epoch_metrics import Alarm, Totals
from tritium.ml.torch.equal_weights import refuse_different, take_buffers
from tritium.ml.torch.gradients import Gradients
from tritium.ml.torch.ranks import Ranks, joined
from tritium.ml.torch.resume import about
from tritium.ml.torch.schedule import Pace, Show, Stopper
from tritium.ml.torch.step import OwnStep, Step, describe, make_step
from tritium.model.weights import Tensors

WEIGHTS = "weights.safetensors"
_PIECE = 4 << 20


def train(
    settings: TorchSettings,
    validate: bool,
    unused: bool,
    named: bool = False,
    planned: dict[str, Any] | None = None,
    tried: bool = True,
) -> dict[str, Any] | None:
    """Train on this rank's shards. Rank 0 stores the weights, and returns the history and the shapes it saw.

    `unused` says that some parameters get no gradient, so that ranks do not wait for one; `named`, that the user named
    the run directory, where a training goes on that was begun there; `planned` is what the driver knows of this
    training, which goes into its checkpoints; `tried`, that the driver has seen the module's output.
    """
    world = this_world()
    with joined(world) as ranks:
        if settings.train_step is not None:
            ranks.stepping = lambda module: OwnStep(module, settings)
        return _train(settings, validate, unused, named, planned, tried, world, ranks)


def _train(
    settings: TorchSettings,
    validate: bool,
    unused: bool,
    named: bool,
    planned: dict[str, Any] | None,
    tried: bool,
    world: World,
    ranks: Ranks,
) -> dict[str, Any] | None:
    batch_size = settings.rows_per_rank(ranks.size)
    tell = world.note if ranks.rank == 0 else lambda _: None
    torch.manual_seed(settings.seed)
    module = settings.make_module().to(ranks.device)
    replica = Replica(module, ranks, unused)
    world.expect_file(WEIGHTS, known_bytes(module))
    torch.manual_seed(settings.seed + ranks.rank)  # dropout differs from rank to rank
    optimizer = settings.make_optimizer(module)
    step = make_step(settings, ranks.device)
    shard = world.shard("train")
    if validate and settings.shuffle != "stream":  # where rows still arrive, it is too early to count them
        check_some_rows(world.shard("validation").counts, settings)
    this = about(settings, module, optimizer, shard.schema)
    whole = lambda: step_count(shard.counts, batch_size, settings.remainder)  # noqa: E731
    alarm, pace = Alarm(ranks, shard.schema), Pace(settings, optimizer, whole, tell)
    stopper, show = Stopper(settings, module, tell), Show(settings, world)
    state = TrainState(module, optimizer, ranks.rank, ranks.size, ranks.device)
    keeper = Keeper(settings, world, shard, state, replica, alarm, pace, stopper, this, planned, must=named)
    keeper.load()
    for callback in settings.callbacks:
        callback.on_train_start(state)
    resume = keeper.put_back()
    tell_untrained(module, optimizer, tell)
    order = settings.order() | {"batch_size": batch_size, "device": ranks.device, "resume": resume}
    for epoch in shard.epochs(keeper.epochs, **order):
        totals = keeper.totals(epoch, ranks)
        pace.before_epoch(epoch)
        net, gradients = replica.net, replica.gradients
        net.train()
        for group in epoch.groups(settings.gradient_accumulation):
            losses = backward(net, group, step, gradients, totals)
            batches = group.taken  # without their columns
            alarm.watch(batches, losses, gradients.norm())
            if settings.clip_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(net.parameters(), settings.clip_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            pace.after_step()
            keeper.after_step(batches[-1], totals)
            if not tried:  # what no prediction can be made of is better found now than after the last epoch
                describe(module, settings, keeper.example())
                net.train()
                tried = True
            show.step(epoch, batches, losses[-1])
        alarm.settle()
        if epoch.number == 0 and settings.verbose:
            tell_one_step(epoch, shard.counts, batch_size, tell)
        entry = totals.close(epoch.number + 1)
        take_buffers(module, ranks)  # the model that is returned has rank 0's: all validate with those
        if validate:
            entry |= validation(world.shard("validation"), batch_size, module, step, settings, ranks)
            take_buffers(module, ranks)  # an observer's and a counter's change in eval mode, too
        entry["learning_rate"] = pace.learning_rate()
        state.epoch = entry["epoch"]
        state.history.append(entry)
        pace.after_epoch(entry)
        stopper.look_at(entry)
        for callback in settings.callbacks:
            callback.on_epoch_end(state)
        replica.refresh(optimizer)
        refuse_different(module, ranks, tell)
        show.epoch(epoch, entry)
        if ranks.any(state.stop or stopper.enough):
            break
        keeper.after_epoch()
    keeper.at_end()
    stopper.restore_best()
    for callback in settings.callbacks:
        callback.on_train_end(state)
    take_buffers(module, ranks)
    refuse_different(module, ranks, tell)
    if ranks.rank != 0:
        return None
    world.store(WEIGHTS, pieces(Tensors.of(module).stream()))
    return {"history": state.history, **describe(module, settings, keeper.example())}


def tell_one_step(epoch: Any, counts: Sequence[int], batch_size: int, tell: Callable[[str], Any]) -> None:
    """A line where a batch is larger than what a rank has."""
    if epoch.steps == 1 and max(counts) < batch_size:
        tell(
            f"an epoch is one step: batch_size={batch_size:,} is more than the {max(counts):,} rows of a rank. "
            "A smaller one takes more steps"
        )


def backward(
    net: torch.nn.Module, group: Group, step: Step, gradients: Gradients, totals: Totals
) -> list[torch.Tensor]:
    """Leaves the gradients of one optimizer step on every rank; adds to `totals`, and gives each batch's mean loss."""
    losses = []
    for batch in group:
        with gradients.exchanged(now=group.at_last):
            loss, output = step(net, batch)
            # The mean over all rows of all ranks and batches, as one process would compute it.
            (loss * (batch.scale * batch.total / group.total)).backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())
        totals.add(batch, loss, output)
    return losses


def known_bytes(module: torch.nn.Module) -> int:
    """Of the parameters whose shape is known before the first batch."""
    return sum(value.nbytes for value in module.parameters() if not torch.nn.parameter.is_lazy(value))


def pieces(views: Iterable[memoryview]) -> Iterator[bytes]:
    """What `world.store` takes at a time, without a second copy of the weights."""
    for view in views:
        for start in range(0, len(view), _PIECE):
            yield bytes(view[start : start + _PIECE])


def validation(
    shard: Any, batch_size: int, module: torch.nn.Module, step: Step, settings: TorchSettings, ranks: Ranks
) -> dict[str, Any]:
    """Loss and metrics over the validation rows of all ranks, under names that begin with `validation_`.

    A rank without such rows takes no step. EmptyShard where no rank has any.
    """
    check_some_rows(shard.counts, settings)
    totals = Totals(settings.named_metrics(), ranks)
    uneven = 0 in shard.counts  # then each takes its own steps, some none
    module.eval()
    with torch.no_grad():
        rows = shard.alone() if uneven else shard
        order = {"batch_size": batch_size, "shuffle": False, "remainder": "pad", "device": ranks.device}
        for epoch in rows.epochs(1, **order) if shard.rows else ():
            for batch in epoch:
                totals.add(batch, *step(module, batch))
    return {f"validation_{name}": value for name, value in totals.means(uneven=uneven).items()}


def check_some_rows(counts: Sequence[int], settings: TorchSettings) -> None:
    """EmptyShard where there are no rows to validate on, with the same text on every rank."""
    if not any(counts):
        fix = "Give a larger fraction" if isinstance(settings.validation, float) else "Look at what it holds"
        raise EmptyShard(
            f"There are no rows to validate on: validation={settings.validation!r} gives none (rows per rank: "
            f"{', '.join(map(str, counts[:64]))}). {fix}, or validation=None.",
            counts=list(counts),
        )
