"""The process group of a training, and its module under DDP (rank)."""

from __future__ import annotations

import gc
import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tritium.errors import BadSetting, RanksDiffer
from tritium.ml.torch.comm_hook import CommHook
from tritium.ml.torch.ddp_options import NEEDS_GPUS, ddp_keywords
from tritium.ml.torch.gradients import Gradients

T = TypeVar("T")
Stepping = Callable[[torch.nn.Module], torch.nn.Module]
_LISTED = 3
_SYNC_BUFFERS = "forward_sync_buffers"  # from torch 2.13 on; the name before is deprecated


class Ranks:
    """Collectives, which every rank must call at the same places; with one rank they cost nothing."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.stepping: Stepping = lambda module: module
        """From a module, what DDP wraps; its forward must compute all that gradients are taken of."""

    def replicate(
        self,
        module: torch.nn.Module,
        find_unused_parameters: bool,
        options: Mapping[str, Any] | None = None,
    ) -> torch.nn.Module:
        """Return the module with rank 0's weights, whose gradients are averaged over ranks in `backward`.

        find_unused_parameters : some parameters get no gradient, and DDP must not wait for them.
        options : the `ddp_options` of the settings.
        """
        if self.size == 1 or not any(p.requires_grad for p in module.parameters()):
            return module
        keywords = ddp_keywords(options, find_unused_parameters=find_unused_parameters)
        if "broadcast_buffers" in keywords and _SYNC_BUFFERS in inspect.signature(DistributedDataParallel).parameters:
            keywords[_SYNC_BUFFERS] = keywords.pop("broadcast_buffers")
        return DistributedDataParallel(self.stepping(module), **keywords)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the element-wise sum over ranks, computed in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """Return the element-wise maximum over ranks, computed in place."""
        if self.size > 1:
            dist.all_reduce(values, dist.ReduceOp.MAX)
        return values

    def from_first(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrite these tensors with rank 0's, in one broadcast for all of them."""
        tensors = [t for t in tensors if t.layout == torch.strided and t.numel()]
        if self.size == 1 or not tensors:
            return
        with torch.no_grad():
            parts = [t.detach().contiguous().reshape(-1).view(torch.uint8).to(self.device) for t in tensors]
            whole = torch.cat(parts)
            dist.broadcast(whole, 0)
            for tensor, bits in zip(tensors, torch.split(whole, [len(part) for part in parts]), strict=True):
                # A copy, as a view of another type must begin at a multiple of that type's size.
                tensor.detach().copy_(bits.clone().view(tensor.dtype).view(tensor.shape))

    def same(self, text: str) -> bool:
        """Return whether a text is the same on every rank. Exchanges 16 bytes."""
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)
        greatest, least = self.largest(torch.tensor([digest, ~digest], device=self.device)).tolist()
        return bool(greatest == ~least)  # the greatest ~digest is that of the least digest

    def any(self, flag: bool) -> bool:
        """Return whether `flag` is true on any rank."""
        return bool(self.sum(torch.tensor([float(flag)], device=self.device)).item())

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order, on every rank. A value must be picklable."""
        held = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(held, value)
        return held


@contextmanager
def joined(world: Any) -> Iterator[Ranks]:
    """Join a process group over the gang (gloo, with nccl for GPUs), and restore the random state at the end."""
    device = torch.device(world.device)
    gpus = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus):
        if gpus:
            torch.cuda.set_device(device)
        if world.size > 1:
            dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo")
        try:
            yield Ranks(world.rank, world.size, device)
        finally:
            if world.size > 1:
                dist.destroy_process_group()


class Replica:
    """One module on all ranks: `net` is what a step calls, `gradients` the exchange of its gradients.

    DDP exchanges the gradients of the parameters that were trainable when it was made. After a callback has frozen or
    unfrozen others, every rank must call `refresh`. The parameters stay the same objects, so that the optimizer keeps
    its state.
    """

    sharded: Literal[False] = False

    def __init__(
        self,
        module: torch.nn.Module,
        ranks: Ranks,
        find_unused_parameters: bool,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Wrap the module.

        find_unused_parameters : some of the parameters that are trainable now get no gradient.
        options : the `ddp_options` of the settings.
        """
        self.module, self._ranks, self._find_unused = module, ranks, find_unused_parameters
        self._options = options or {}
        self.comm_hook = CommHook(self._options.get("comm_hook"))
        self._known = set(self.trainable)  # what the dry run on the driver has tried
        self._wrap()

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self._ranks.device

    @property
    def trainable(self) -> list[str]:
        """The names of the parameters that require a gradient."""
        return [name for name, parameter in self.module.named_parameters() if parameter.requires_grad]

    def refresh(self, optimizer: torch.optim.Optimizer) -> None:
        """Exchange the gradients of what is trainable now. A collective call, cheap where nothing has changed.

        After a change the parameters take rank 0's values. Raises, the same on every rank, RanksDiffer where ranks
        train different parameters, and BadSetting for one that was unfrozen and that the optimizer does not hold.
        """
        before, now = self._wrapped, self._trained()
        same = len(before) == len(now) and all(a[0] == b[0] and a[1] is b[1] for a, b in zip(before, now, strict=True))
        if not self._ranks.any(not same):
            return
        self._refuse_different()
        known, unheld = {id(parameter) for _, parameter in before}, set(outside(self.module, optimizer))
        missing = [name for name, parameter in now if name in unheld and id(parameter) not in known]
        if missing:
            raise BadSetting(
                f"{_listed(missing)} was unfrozen and is in no group of the optimizer, so that it would never learn. "
                "Give the optimizer all parameters (those that are frozen get no gradient and are left alone), or add "
                'a group in the callback: state.optimizer.add_param_group({"params": …}), whose learning rate no '
                "lr_scheduler changes.",
                parameters=missing,
            )
        self._wrap()

    def ungrouped(self, optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
        """Return the parameters that are in no group of the optimizer, trainable or not."""
        held = held_by(optimizer)
        return [parameter for parameter in self.module.parameters() if id(parameter) not in held]

    @property
    def order(self) -> list[str] | None:
        """The order of the buckets, for a checkpoint; None where it is not known, or plays no part."""
        return self.gradients.order

    def restore(self, order: Sequence[str] | None) -> None:
        """Continue with the buckets of a training whose first step had this order. A collective call."""
        self.gradients.restore(order)

    def call(self, step: Callable[[Any, Any], T], batch: Any) -> T:
        """Return `step(net, batch)`."""
        return step(self.net, batch)

    def copy_of_weights(self) -> dict[str, torch.Tensor]:
        """Return a copy of the weights and buffers on the CPU."""
        return copy_of_weights(self.module)

    def train(self) -> None:
        """Set train mode."""
        self.net.train()

    def train_only(self, names: Sequence[str]) -> None:
        """Freeze all parameters but these. Call `refresh` afterwards."""
        chosen = set(names)
        for name, parameter in self.module.named_parameters():
            parameter.requires_grad_(name in chosen)

    def _trained(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, parameter) for name, parameter in self.module.named_parameters() if parameter.requires_grad]

    def _wrap(self) -> None:
        again = hasattr(self, "net")
        self.net: torch.nn.Module = self.module
        self.gradients = Gradients(self.module)
        if again:
            gc.collect()  # the previous DDP removes its hooks from the parameters when it is freed
        for parameter in self.module.parameters():
            parameter.grad = None
        self._wrapped = self._trained()
        # The dry run has not tried whether what was frozen when the training began gets a gradient at all.
        find_unused = self._find_unused or not self._known.issuperset(self.trainable)
        self.net = self._ranks.replicate(self.module, find_unused, self._options)
        if isinstance(self.net, DistributedDataParallel):
            self.comm_hook.register(self.net)
        self.gradients = Gradients(self.net, self.module, self._options)

    def _refuse_different(self) -> None:
        each = self._ranks.gather(self.trainable)
        wrong = [rank for rank, names in enumerate(each) if names != each[0]]
        if not wrong:
            return
        rank = wrong[0]
        more = [name for name in each[rank] if name not in each[0]]
        less = [name for name in each[0] if name not in each[rank]]
        what = (
            f"rank {rank} trains {_listed(more)}, and rank 0 does not"
            if more
            else (f"rank 0 trains {_listed(less)}, and rank {rank} does not")
        )
        raise RanksDiffer(
            f"A callback has left the ranks with different parameters to train: {what}. Freeze and unfreeze the same "
            "layers on every rank, whatever state.rank is.",
            ranks=wrong,
            tensor=(more or less)[0],
        )


def with_sync_batch_norm(module: torch.nn.Module, options: Mapping[str, Any] | None, ranks: Ranks) -> torch.nn.Module:
    """Return the module with layers that take the statistics of all ranks, if the options say so.

    Parameters and buffers stay the same objects, of the same names. Raises BadSetting where ranks compute on CPUs.
    """
    if ranks.size == 1 or not (options or {}).get("sync_batch_norm"):
        return module
    if ranks.device.type == "cpu":
        raise BadSetting(NEEDS_GPUS, setting="ddp_options")
    converted: torch.nn.Module = torch.nn.SyncBatchNorm.convert_sync_batchnorm(module)  # type: ignore[no-untyped-call]
    return converted


def copy_of_weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of the module's weights and buffers on the CPU."""
    return {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}


def outside(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of the trainable parameters that are in no group of the optimizer."""
    held = held_by(optimizer)
    return [name for name, p in module.named_parameters() if p.requires_grad and id(p) not in held]


def held_by(optimizer: torch.optim.Optimizer) -> set[int]:
    """Return the ids of the parameters in the groups of an optimizer."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def tell_untrained(module: torch.nn.Module, optimizer: torch.optim.Optimizer, tell: Callable[[str], Any]) -> None:
    """Tell the user about trainable parameters that are in no group of the optimizer, if there are any."""
    missing = outside(module, optimizer)
    if missing:
        count = len(list(module.named_parameters()))
        tell(
            f"{len(missing)} of {count} tensors of weights are in no group of the optimizer, and are not trained: "
            f"{_listed(missing)}"
        )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:_LISTED])) + (", …" if len(names) > _LISTED else "")
