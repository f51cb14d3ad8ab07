"""The exchange of gradients by DDP, the same in a training that continues as in one that was not interrupted (rank)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from tritium.errors import BadSetting

# How DDP says it, the second with static_graph.
_UNFINISHED = ("Expected to have finished reduction in the prior iteration", "Your training graph has changed")
_SKIPPED = (
    "Some parameters got no gradient in this step, and all did when the module was tried with zeros. A module that "
    "skips layers at random (stochastic depth) needs a train_step, which may leave out parameters: "
    "train_step=lambda module, batch: your_loss(module(batch['features']), batch['label'])."
)

_PROMISED = (
    "Some parameters got no gradient in this step, and ddp_options={{{0!r}: {1!r}}} says that the same ones get a "
    "gradient in every step. Leave that option out."
)


class Gradients:
    """DDP's exchange of gradients, and the order of its buckets.

    In its first step DDP exchanges all gradients as one bucket, in the reverse order of the module's parameters; from
    the second on in buckets that follow the order in which those of the first step arrived on rank 0. The place of a
    gradient in its bucket decides which rank's share is added first, and so the last bit of a sum of three or more. A
    training that continues at a later step needs the later buckets at once, so checkpoints hold their order.

    Without DDP (one rank, or nothing to train) there is nothing to exchange.
    """

    def __init__(
        self,
        net: torch.nn.Module,
        module: torch.nn.Module | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Handle the gradients of `net`.

        module : gives errors the parameters' names; None: the one that DDP wraps.
        options : the `ddp_options` of the settings.
        """
        self._net = net if isinstance(net, DistributedDataParallel) else None
        # With find_unused_parameters DDP never rebuilds its buckets; with static_graph it does, in an order that is
        # learnt in a real first step, for which `restore` has no stand-in.
        self._keeps = self._net is None or bool(self._net.find_unused_parameters or self._net.static_graph)
        self._skipped = _skipped(options or {})
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
                if not any(said in str(error) for said in _UNFINISHED):
                    raise
                raise BadSetting(self._skipped) from error
        if now and not self._keeps and any(parameter.grad is None for parameter in self._trained):
            raise BadSetting(self._skipped)  # DDP, and with it the other ranks, would wait for those in the next step
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

    def norms(self) -> list[torch.Tensor]:
        """Return the L2 norm of each exchanged gradient, the same on every rank."""
        arrived = [_numbers(parameter.grad) for parameter in self._trained if parameter.grad is not None]
        return list(torch._foreach_norm(arrived)) if arrived else []  # get_total_norm groups them first: 0.05 ms

    def clip(self, largest: float) -> None:
        """Scale the gradients so that their norm is at most `largest`."""
        torch.nn.utils.clip_grad_norm_(self._trained, largest)

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


def _skipped(options: Mapping[str, Any]) -> str:
    """Return the message for parameters that got no gradient in some step."""
    for name, value in (("static_graph", True), ("find_unused_parameters", False)):
        if options.get(name) is value:
            return _PROMISED.format(name, value)
    return _SKIPPED


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
