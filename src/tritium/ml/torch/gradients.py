"""The exchange of gradients between ranks, in the same order after an interruption as without one (rank)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from tritium.errors import BadSetting


class Gradients:
    """DDP's exchange, and the order of its buckets.

    In its first step DDP exchanges all gradients as one bucket, in the reverse order of the module's parameters; from
    the second on in buckets that follow the order in which those of the first step arrived on rank 0. Where a gradient
    lies in its bucket decides which rank's share is added first, and so the last bit of a sum of three or more. A
    training that goes on at a later step must have the later buckets at once, so their order is kept with a checkpoint.

    Without DDP (one rank, or nothing to train) there is nothing to exchange.
    """

    def __init__(self, net: torch.nn.Module, module: torch.nn.Module | None = None) -> None:
        """`module`: by whose names a parameter is called in an error."""
        self._net = net if isinstance(net, DistributedDataParallel) else None
        # With parameters that may get no gradient DDP never makes its buckets anew.
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
        """Around forward and backward. With `now=False` gradients are only accumulated, and stay on their rank."""
        with nullcontext() if now or self._net is None else self._net.no_sync():
            if now and not self._keeps and self.order is None:
                with self._noted():
                    yield
            else:
                yield
        if self._frozen and now:
            self._refuse_unfrozen()

    def _refuse_unfrozen(self) -> None:
        """BadSetting for a parameter whose gradient stays on its rank, as DDP took it for a frozen one."""
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
        """The L2 norm of what was exchanged, the same on every rank."""
        arrived = (parameter.grad for parameter in self._trained if parameter.grad is not None)
        return torch.nn.utils.get_total_norm([_numbers(gradient) for gradient in arrived])

    def restore(self, order: Sequence[str] | None) -> None:
        """Go on with the buckets of a training whose first step had this order. A collective, of zeros.

        To be called before the weights and the optimizer are put back: hooks on parameters are called.
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
        net.zero_grad(set_to_none=True)  # the next forward makes the buckets


def _numbers(gradient: torch.Tensor) -> torch.Tensor:
    """What a norm can be taken of, in a type that holds the norm of many."""
    numbers = gradient.coalesce().values() if gradient.is_sparse else gradient
    return numbers.float() if numbers.dtype == torch.float16 else numbers


class _Arriving(torch.nn.Module):
    """Stands in for a module for one step: its gradients arrive in the order given, those not named last."""

    def __init__(self, module: torch.nn.Module, order: Sequence[str]) -> None:
        super().__init__()
        self.module = module  # DDP looks for its buffers
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._arriving = [trained.pop(name) for name in order if name in trained] + list(trained.values())
        self._sparse = {
            id(part.weight)
            for part in module.modules()
            if isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag) and part.sparse
        }

    def forward(self) -> Any:
        """A sum whose gradients are computed from its last term to its first."""
        total: Any = 0.0
        for parameter in reversed(self._arriving):
            total = total + self._touched(parameter).sum()
        return total

    def _touched(self, parameter: torch.Tensor) -> torch.Tensor:
        if id(parameter) not in self._sparse:
            return parameter
        first = torch.zeros(1, dtype=torch.long, device=parameter.device)
        return torch.nn.functional.embedding(first, parameter, sparse=True)  # DDP insists on gradients of this layout
