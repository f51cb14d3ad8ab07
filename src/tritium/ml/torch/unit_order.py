"""Whether every rank gathers the same units of a sharded module in the same order (rank)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tritium.errors import BadSetting
from tritium.ml.torch.ddp import Ranks


class UnitOrder:
    """Looks at each call of a unit, and at its backward, before FSDP exchanges something for it.

    A rank that called another unit than the others would read their weights as its own, where the shapes are equal,
    or wait for ever. The first step is compared over the ranks, call by call. Later ones are compared with the first
    one on each rank alone, which costs no exchange.
    """

    def __init__(self, names: Sequence[str], ranks: Ranks, missing: Callable[[], list[str]]) -> None:
        """`names`: of the units. `missing`: returns the trainable parameters that have no gradient."""
        self._names, self._ranks, self._missing = names, ranks, missing
        self._agreed: dict[str, list[str]] = {}
        self._calls: list[str] = []
        self._kind, self._first = "", False

    def began(self, kind: str) -> bool:
        """Return whether a call of this kind has ended."""
        return kind in self._agreed

    def begin(self, kind: str) -> None:
        """Begin a call of the module. Calls of one kind, such as "training", are to be equal."""
        self._kind, self._calls, self._first = kind, [], kind not in self._agreed

    def end(self) -> None:
        """Accept the calls since `begin` as those of the first step."""
        if self._first:
            self._agreed[self._kind] = self._calls

    def watch(self, unit: torch.nn.Module, number: int) -> None:
        """Look at the calls of a unit from now on, before FSDP's own hooks, which it must have already."""
        name = self._names[number]

        def before_forward(_: Any, __: Any) -> None:
            self._called(f"the forward of {name}")

        def after_forward(_: Any, __: Any, output: Any) -> None:
            once: list[bool] = []

            def before_backward(_: Any) -> None:
                if not once:
                    once.append(True)
                    self._called(f"the backward of {name}")

            for tensor in tensors_of(output):
                if tensor.requires_grad:
                    tensor.register_hook(before_backward)  # type: ignore[no-untyped-call]

        unit.register_forward_pre_hook(before_forward, prepend=True)
        unit.register_forward_hook(after_forward, prepend=True)

    def after_forward(self, loss: Any) -> None:
        """Compare that the forward is over, and let the end of the backward be compared, too."""
        self._called("the end of the forward")
        for tensor in tensors_of(loss):
            if tensor.requires_grad:
                tensor.register_hook(self._at_backward)  # type: ignore[no-untyped-call]
                break

    def _at_backward(self, _: Any) -> None:
        """Have `_after` called when all gradients are computed: before FSDP's own callback, which is queued later."""
        torch.autograd.Variable._execution_engine.queue_callback(self._after)

    def _after(self) -> None:
        """Compare which parameters got a gradient, before FSDP exchanges those outside of units."""
        missing = self._missing()
        without = f", {len(missing)} weights without a gradient ({', '.join(missing[:3])})" if missing else ""
        self._called(f"the end of the backward{without}")
        self.end()

    def _called(self, what: str) -> None:
        self._calls.append(what)
        place = len(self._calls) - 1
        if self._first:
            if self._ranks.same(f"{place} {what}"):
                return
            others = self._ranks.gather(what)
            expected = "; ".join(f"rank {rank} {other}" for rank, other in enumerate(others[:8]))
        else:
            agreed = self._agreed[self._kind]
            if agreed[place : place + 1] == [what]:
                return
            before = agreed[place] if place < len(agreed) else "nothing more"
            expected = f"rank {self._ranks.rank} {what}, and {before} in the first step"
        raise BadSetting(
            f"The ranks, or the steps of {self._kind}, do not use the same layers in the same order: at call "
            f"{place + 1}, {expected}. strategy='fsdp' gathers the weights of a layer from all ranks when it is "
            "called, so every rank must call the same layers in every step; take strategy='ddp' with a train_step, "
            "which may leave out layers.",
            setting="strategy",
        )


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors in what a module returns: a tensor, or sequences, mappings and objects of them."""
    leaves = torch.utils._pytree.tree_leaves(value)
    found = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    for leaf in leaves:  # such as a dataclass
        if not isinstance(leaf, torch.Tensor) and hasattr(leaf, "__dataclass_fields__"):
            found += [v for v in vars(leaf).values() if isinstance(v, torch.Tensor)]
    return found
