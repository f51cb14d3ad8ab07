"""The process group of a training, its module under DDP, and the exchange of gradients (rank)."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tritium.errors import BadSetting, RanksDiffer
from tritium.ml.torch.ddp_warning import spend_warning

T = TypeVar("T")
_LISTED = 3
_UNFINISHED = "Expected to have finished reduction in the prior iteration"  # how DDP says it
_SKIPPED = (
    "Some parameters got no gradient in this step, and all did when the module was tried with zeros. A module that "
    "skips layers at random (stochastic depth) needs a train_step, which may leave out parameters: "
    "train_step=lambda module, batch: your_loss(module(batch['features']), batch['label'])."
)


class Ranks:
    """Collectives, which every rank must call at the same places; with one rank they cost nothing."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.stepping: Callable[[torch.nn.Module], torch.nn.Module] = lambda module: module
        """From a module, what DDP wraps; its forward must compute all that gradients are taken of."""

    def replicate(self, module: torch.nn.Module, find_unused_parameters: bool) -> torch.nn.Module:
        """Return the module with rank 0's weights, whose gradients are averaged over ranks in `backward`.

        `find_unused_parameters`: some parameters get no gradient, and DDP must not wait for them.
        """
        if self.size == 1 or not any(p.requires_grad for p in module.parameters()):
            return module
        if find_unused_parameters:
            spend_warning()
        return DistributedDataParallel(
            self.stepping(module), gradient_as_bucket_view=True, find_unused_parameters=find_unused_parameters
        )

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


class Gradients:
    """DDP's exchange of gradients, and the order of its buckets.

    In its first step DDP exchanges all gradients as one bucket, in the reverse order of the module's parameters; from
    the second on in buckets that follow the order in which those of the first step arrived on rank 0. The place of a
    gradient in its bucket decides which rank's share is added first, and so the last bit of a sum of three or more. A
    training that continues at a later step needs the later buckets at once, so checkpoints hold their order.

    Without DDP (one rank, or nothing to train) there is nothing to exchange.
    """

    def __init__(self, net: torch.nn.Module, module: torch.nn.Module | None = None) -> None:
        """Handle the gradients of `net`. `module` gives errors the parameters' names; None: the one that DDP wraps."""
        self._net = net if isinstance(net, DistributedDataParallel) else None
        # With find_unused_parameters DDP never rebuilds its buckets.
        self._keeps = self._net is None or bool(self._net.find_unused_parameters)
        self._trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
        self._frozen: list[tuple[str, torch.nn.Parameter]] = []
        if self._net is not None:
            named = (module or self._net.module).named_parameters()
            self._frozen = [(name, parameter) for name, parameter in named if not parameter.requires_grad]
        self.order: list[str] | None = None
        """Names of parameters as their gradients arrived in the first step; None before it."""

    @contextmanager
    def exchanged(self, *, now: bool) -> Iterator[None]:
        """Exchange the gradients of a forward and backward; with `now=False` only accumulate them on each rank."""
        noted = self._noted() if now and not self._keeps and self.order is None else nullcontext()
        with nullcontext() if now or self._net is None else self._net.no_sync(), noted:
            try:
                yield
            except RuntimeError as error:
                if _UNFINISHED not in str(error):
                    raise
                raise BadSetting(_SKIPPED) from error
        if now and not self._keeps and any(parameter.grad is None for parameter in self._trained):
            raise BadSetting(_SKIPPED)  # DDP, and with it the other ranks, would wait for those in the next step
        if self._frozen and now:
            self._refuse_unfrozen()

    def _refuse_unfrozen(self) -> None:
        """Raise BadSetting for a parameter whose gradient is not exchanged, as it was frozen when DDP was made."""
        names = [name for name, parameter in self._frozen if parameter.requires_grad]
        if names:
            raise BadSetting(
                f"{names[0]!r} was unfrozen within a step ({len(names)} tensors in all), and its gradient is not "
                "exchanged between the ranks. Freeze and unfreeze layers in a callback: in on_train_start or "
                "on_epoch_end.",
                parameters=names,
            )

    @contextmanager
    def _noted(self) -> Iterator[None]:
        assert self._net is not None
        arrived: list[str] = []
        hooks = [
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))
            for name, parameter in self._net.module.named_parameters()
            if parameter.requires_grad
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self.order = arrived

    def norm(self) -> torch.Tensor:
        """Return the L2 norm of the exchanged gradients, the same on every rank."""
        arrived = (parameter.grad for parameter in self._trained if parameter.grad is not None)
        return torch.nn.utils.get_total_norm([_numbers(gradient) for gradient in arrived])

    def restore(self, order: Sequence[str] | None) -> None:
        """Continue with the buckets of a training whose first step had this order. A collective call, over zeros.

        Must be called before the weights and the optimizer are restored, as hooks on parameters are called.
        """
        self.order = None if order is None else list(order)
        if self._keeps or not order:
            return
        net = self._net
        assert net is not None
        module = net.module
        net.module = _Arriving(module, order)
        try:
            loss = net()
            loss.backward(torch.zeros_like(loss))
        finally:
            net.module = module
        net.zero_grad(set_to_none=True)  # the next forward rebuilds the buckets


def _numbers(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient's values, dense and in a type that can hold the norm of many."""
    numbers = gradient.coalesce().values() if gradient.is_sparse else gradient
    return numbers.float() if numbers.dtype == torch.float16 else numbers


class _Arriving(torch.nn.Module):
    """A stand-in for a module in one step, whose gradients arrive in the given order, those not named last."""

    def __init__(self, module: torch.nn.Module, order: Sequence[str]) -> None:
        super().__init__()
        self.module = module  # DDP needs its buffers
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._arriving = [trained.pop(name) for name in order if name in trained] + list(trained.values())
        self._sparse = {
            id(part.weight)
            for part in module.modules()
            if isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag) and part.sparse
        }

    def forward(self) -> Any:
        """Return a sum whose gradients are computed from its last term to its first."""
        total: Any = 0.0
        for parameter in reversed(self._arriving):
            total = total + self._touched(parameter).sum()
        return total

    def _touched(self, parameter: torch.Tensor) -> torch.Tensor:
        if id(parameter) not in self._sparse:
            return parameter
        first = torch.zeros(1, dtype=torch.long, device=parameter.device)
        return torch.nn.functional.embedding(first, parameter, sparse=True)  # DDP requires sparse gradients here


class Replica:
    """One module on all ranks: `net` is what a step calls, `gradients` the exchange of its gradients.

    DDP exchanges the gradients of the parameters that were trainable when it was made. After a callback has frozen or
    unfrozen others, every rank must call `refresh`. The parameters stay the same objects, so that the optimizer keeps
    its state.
    """

    def __init__(self, module: torch.nn.Module, ranks: Ranks, find_unused_parameters: bool) -> None:
        """Wrap the module. `find_unused_parameters`: some of the parameters that are trainable now get no gradient."""
        self.module, self._ranks, self._find_unused = module, ranks, find_unused_parameters
        self._known = set(self.trainable)  # what the dry run on the driver has tried
        self._wrap()

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
        self.net = self._ranks.replicate(self.module, find_unused)
        self.gradients = Gradients(self.net, self.module)

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
