"""A module whose weights are sharded over the ranks by FSDP2 (rank; the driver looks for what can't be sharded)."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tritium.errors import BadSetting, RanksDiffer
from tritium.ml.torch.ddp import CommHook, ModuleOnRanks
from tritium.ml.torch.ranks import Ranks

T = TypeVar("T")
_LISTS = (torch.nn.ModuleList, torch.nn.ModuleDict)


class ShardedModule(ModuleOnRanks):
    """A module of which each rank holds a part of every parameter, and of its gradient and optimizer state.

    A unit (`units_of`) is gathered before its forward and its backward, and released after it, so every rank must call
    the same units in the same order. The optimizer must be made of the module afterwards: its parameters are others.
    """

    sharded: Literal[True] = True
    order: Any = None
    """DDP's buckets have one; there are none here."""

    def __init__(self, module: torch.nn.Module, ranks: Ranks) -> None:
        """Shard the parameters of rank 0's values, in place. Raises BadSetting for those that can't be sharded."""
        refuse_unshardable(module)
        super().__init__(module, ranks)
        self.comm_hook = CommHook(None)
        for tensor in (*module.parameters(), *module.buffers()):
            ranks.from_first([tensor])  # One by one, so that a GPU holds one at a time.
        mesh = init_device_mesh(ranks.device.type, (ranks.size,))
        for number, unit in enumerate(units_of(module)):
            fully_shard(unit, mesh=mesh)
            unit.register_forward_pre_hook(functools.partial(self._on_call, number))
        self._root = _Root(module)
        fully_shard(self._root, mesh=mesh)
        self.gradients = ShardedGradients(module, ranks)
        self._wrapped, self._has_trained = self.trainable, False
        self._call_order = 0
        """A hash of the numbers of the units in the order in which they were called."""

    def _on_call(self, number: int, *_: Any) -> None:
        self._call_order = hash((self._call_order, number))

    def call(self, step: Callable[[Any, Any], T], batch: Any) -> T:
        """Return `step(module, batch)`, in which the module can be called. A collective call."""
        if torch.is_grad_enabled():
            self._has_trained = True
            return self._root(step, batch)  # type: ignore[no-any-return]
        try:
            return self._root(step, batch)  # type: ignore[no-any-return]
        finally:  # There is no backward, which would release the weights that this forward has gathered.
            for part in self._root.modules():
                if isinstance(part, FSDPModule):
                    part.reshard()

    def refresh(self, optimizer: torch.optim.Optimizer) -> None:
        """Accept layers that a callback froze before the first step. A collective call, after each epoch.

        Raises BadSetting, the same on every rank, for a change after it, as the gathered parameters keep what they
        were; and where ranks have called other units, or in another order. Units of equal shapes would then have been
        gathered of the parts of several, and nothing else shows that; with other shapes a rank fails, or hangs.
        """
        del optimizer
        if not self._ranks.same(str(self._call_order)):
            order = self._ranks.gather(self._call_order)
            other = next(rank for rank, calls in enumerate(order) if calls != order[0])
            raise BadSetting(
                f"Rank {other} has not called the same layers in the same order as rank 0. strategy='fsdp' gathers the "
                "weights of a layer from all ranks when it is called, so that every rank must call the same layers in "
                "every step; take strategy='ddp' with a train_step, which may leave out layers.",
                setting="strategy",
            )
        before, now = self._wrapped, self.trainable
        if not self._ranks.any(before != now):
            return
        if self._has_trained:
            changed = sorted(set(before) ^ set(now))
            raise BadSetting(
                f"A callback has frozen or unfrozen layers after the first step ({len(changed)} tensors on this rank: "
                f"{', '.join(map(repr, changed[:3]))}), which strategy='fsdp' can't. Do it in on_train_start, or take "
                "strategy='ddp'.",
                setting="strategy",
                parameters=changed,
            )
        if not self._ranks.same(repr(now)):
            raise RanksDiffer(
                "A callback has left the ranks with different parameters to train. Freeze and unfreeze the same layers "
                "on every rank, whatever state.rank is.",
                ranks=[],
            )
        self._wrapped = now

    def restore(self, order: Sequence[str] | None) -> None:
        """Do nothing: there are no buckets whose order would matter."""

    def train(self) -> None:
        """Set train mode."""
        self._root.train()

    def copy_of_weights(self) -> dict[str, torch.Tensor]:
        """Return a copy of this rank's part of the weights, and of the buffers."""
        return {name: value.detach().clone() for name, value in self.module.state_dict().items()}

    def whole_weights(self) -> dict[str, Any]:
        """Return the whole weights and the buffers on the CPU of rank 0; nothing on others. A collective call."""
        whole: dict[str, Any] = {}
        seen: dict[int, Any] = {}  # A tensor that is tied is the same object under each of its names.
        for name, value in self.module.state_dict(keep_vars=True).items():
            if id(value) not in seen:
                tensor = value.full_tensor().detach() if isinstance(value, DTensor) else value.detach()
                seen[id(value)] = tensor.cpu() if self._ranks.rank == 0 else None
            whole[name] = seen[id(value)]
        return whole if self._ranks.rank == 0 else {}


class _Root(torch.nn.Module):
    """What FSDP takes for the outermost module: a step, in which the module's methods may be called too."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, step: Callable[[Any, Any], Any], batch: Any) -> Any:
        """Return what the step returns."""
        return step(self.module, batch)


class ShardedGradients:
    """The exchange of gradients by FSDP: each rank gets the mean of its part."""

    def __init__(self, module: torch.nn.Module, ranks: Ranks) -> None:
        self._module, self._ranks = module, ranks

    @contextmanager
    def exchanged(self, *, now: bool) -> Iterator[None]:
        """Exchange the gradients of a forward and backward. Each is exchanged, so that a rank holds parts only."""
        del now
        try:
            yield
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            raise BadSetting(
                "With strategy='fsdp' the weights of an entry of a ModuleList or Sequential are there only while that "
                f"entry itself is called, and a step uses them outside: {error}\nCall the entry (module.layers[0](x)), "
                "not a part of it, or take strategy='ddp'.",
                setting="strategy",
            ) from error

    def _parts(self) -> list[torch.Tensor]:
        gradients = (parameter.grad for parameter in self._module.parameters())
        return [gradient.to_local() for gradient in gradients if isinstance(gradient, DTensor)]

    def norms(self) -> list[torch.Tensor]:
        """Return the L2 norm of all gradients together, the same on every rank. A collective call."""
        return [self._norm()]

    def _norm(self) -> torch.Tensor:
        norms = [torch.linalg.vector_norm(part.float()).double() for part in self._parts() if part.numel()]
        squares = torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64)
        return self._ranks.sum(squares.to(self._ranks.device)).sqrt().float()

    def clip(self, largest: float) -> None:
        """Scale the gradients so that their norm is at most `largest`, as clip_grad_norm_ does. A collective call."""
        factor = (largest / (self._norm() + 1e-6)).clamp(max=1.0)
        for part in self._parts():
            part.mul_(factor.to(part.dtype))


def units_of(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules whose weights are gathered together: the entries of the outermost ModuleLists and Sequentials.

    What they leave, and entries that share a parameter with something outside, is gathered for the whole step.
    """
    uses = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))

    def shares_nothing(entry: torch.nn.Module) -> bool:
        within = Counter(id(p) for _, p in entry.named_parameters(remove_duplicate=False))
        return bool(within) and all(uses[key] == count for key, count in within.items())

    def units_in(part: torch.nn.Module) -> Iterator[torch.nn.Module]:
        listed = isinstance(part, (*_LISTS, torch.nn.Sequential))
        for entry in dict.fromkeys(part.children()):
            if listed and not isinstance(entry, _LISTS):
                if shares_nothing(entry):
                    yield entry
            else:
                yield from units_in(entry)

    return list(units_in(module))


def refuse_unshardable(module: torch.nn.Module) -> None:
    """Raise BadSetting for parameters that FSDP can't shard."""
    scalar = [name for name, parameter in module.named_parameters() if parameter.ndim == 0]
    if scalar:
        raise BadSetting(
            f"{scalar[0]!r} is a parameter without dimensions, which strategy='fsdp' can't shard. Make it of shape "
            "[1], or take strategy='ddp'.",
            setting="strategy",
            parameters=scalar,
        )
    sparse = [name for name, part in module.named_modules() if getattr(part, "sparse", False) is True]
    if sparse:
        raise BadSetting(
            f"The embedding {sparse[0]!r} has sparse gradients, which strategy='fsdp' can't shard. Give it "
            "sparse=False, or take strategy='ddp'.",
            setting="strategy",
        )


# ---- parts of a state in checkpoints


@dataclass(frozen=True)
class WholeShapes:
    """The shapes of the whole parameters, by which a part of a state is known to be sharded.

    A state is {"module": name → tensor, "optimizer": its state_dict, "best": name → tensor}.
    """

    named: Mapping[str, torch.Size]
    numbered: Sequence[torch.Size | None]
    """By the numbers of the optimizer's state; None for a parameter that is not the module's."""

    @classmethod
    def of(cls, module: torch.nn.Module, groups: Sequence[Sequence[str]]) -> WholeShapes:
        """Return those of a module, of whose parameters the optimizer has these groups."""
        named = {name: parameter.shape for name, parameter in module.named_parameters(remove_duplicate=False)}
        return cls(named, [named.get(name) for group in groups for name in group])

    def joined(self, parts: Sequence[Any]) -> Any:
        """Return the whole state of the parts that all ranks saved; rank 0's of what each of them had whole."""

        def whole(values: Sequence[Any], shape: torch.Size | None) -> Any:
            first = values[0]
            if shape is None or not isinstance(first, torch.Tensor) or not 0 < first.ndim == len(shape):
                return first
            local = [value.to_local() if isinstance(value, DTensor) else value for value in values]
            return torch.cat(local) if sum(map(len, local)) == shape[0] else first

        return self._mapped(whole, parts)

    def shared_out(self, state: Any, ranks: Ranks) -> Any:
        """Return a whole state with this rank's parts, as DTensors, of what has the shape of its parameter."""
        mesh = init_device_mesh(ranks.device.type, (ranks.size,))

        def part(values: Sequence[Any], shape: torch.Size | None) -> Any:
            (value,) = values
            if shape is None or not isinstance(value, torch.Tensor) or not value.ndim or value.shape != shape:
                return value
            return distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None)

        return self._mapped(part, [state])

    def _mapped(self, change: Callable[[Sequence[Any], torch.Size | None], Any], states: Sequence[Any]) -> Any:
        """Return the first of these states, each value changed together with those at its place in the others."""

        def named(part: str) -> dict[str, Any]:
            return {k: change([state[part][k] for state in states], self.named.get(k)) for k in states[0][part]}

        optimizers = [state["optimizer"] for state in states]
        numbered = {
            number: {k: change([o["state"][number][k] for o in optimizers], self.numbered[number]) for k in values}
            for number, values in optimizers[0]["state"].items()
        }
        return {"module": named("module"), "best": named("best"), "optimizer": {**optimizers[0], "state": numbered}}
