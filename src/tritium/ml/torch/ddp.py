"""The module under DDP, made anew when other parameters are trained (rank)."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tritium.errors import BadSetting, RanksDiffer
from tritium.ml.torch.gradients import Gradients
from tritium.ml.torch.ranks import Ranks

_LISTED = 3


class Replica:
    """One module on all ranks: `net` is what a step calls, `gradients` the exchange of its gradients.

    DDP exchanges the gradients of the parameters that were trainable when it was made. A callback that freezes or
    unfreezes others must be followed by `refresh`, on every rank. The parameters stay the same objects, so that the
    optimizer keeps its state.
    """

    def __init__(self, module: torch.nn.Module, ranks: Ranks, unused: bool) -> None:
        """`unused`: some of the parameters that are trainable now get no gradient."""
        self.module, self._ranks, self._unused = module, ranks, unused
        self._tried = set(self.trainable)  # what the dry run on the driver knows about
        self._wrap()

    @property
    def trainable(self) -> list[str]:
        """The names of the parameters that require a gradient."""
        return [name for name, parameter in self.module.named_parameters() if parameter.requires_grad]

    def refresh(self, optimizer: torch.optim.Optimizer) -> None:
        """Exchange the gradients of what is trainable now. A collective; cheap where nothing has changed.

        The parameters take rank 0's values when something has. Raises RanksDiffer where ranks train different
        parameters, BadSetting for one that was unfrozen and that the optimizer does not hold; the same on every rank.
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

    def train_only(self, names: Sequence[str]) -> None:
        """Freeze all parameters but these; to be followed by `refresh`."""
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
            gc.collect()  # the DDP of before takes its hooks off the parameters when it is freed
        for parameter in self.module.parameters():
            parameter.grad = None
        self._wrapped = self._trained()
        # Nobody has tried whether what was frozen when the training began gets a gradient at all.
        unused = self._unused or not self._tried.issuperset(self.trainable)
        self.net = self._ranks.replicate(self.module, unused)
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
    """The trainable parameters that are in no group of the optimizer, by name."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return [name for name, p in module.named_parameters() if p.requires_grad and id(p) not in held]


def tell_untrained(module: torch.nn.Module, optimizer: torch.optim.Optimizer, tell: Callable[[str], Any]) -> None:
    """A line about trainable parameters that are in no group of the optimizer, if there are any."""
    missing = outside(module, optimizer)
    if missing:
        count = len(list(module.named_parameters()))
        tell(
            f"{len(missing)} of {count} tensors of weights are in no group of the optimizer, and are not trained: "
            f"{_listed(missing)}"
        )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:_LISTED])) + (", …" if len(names) > _LISTED else "")
