"""What the training loop tells the user's own code (rank)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class TrainState:
    """What a callback sees. The objects are the loop's own; what a callback changes, it changes on every rank."""

    module: Any
    """The `torch.nn.Module` itself, not the DDP around it."""
    optimizer: Any
    rank: int
    size: int
    device: Any
    epoch: int = 0
    """The epoch that has just ended, from 1, as in `history` and in the progress display; 0 before the first."""
    history: list[dict[str, Any]] = field(default_factory=list)
    """One dict per epoch, the same on every rank."""
    stop: bool = False
    """Set to True in `on_epoch_end`, on any rank, it ends the training after this epoch on all of them."""


class Callback:
    """Called in every rank, in the order of the list. Any object with these three methods will do.

    Because every rank calls it, a callback may use collectives (`torch.distributed`, `tr.world().gather`); one
    that prints or writes a file looks at `state.rank == 0` first. A callback is copied to the ranks: what it
    collects stays there. An exception in it ends the training.
    """

    def on_train_start(self, state: TrainState) -> None:
        """Before the first step; the module is on its device, and equal on every rank.

        Where a training continues, weights, history and epoch are those of the checkpoint. What this changes in the
        module or the optimizer is put back after it, as what it did when the training began is in the checkpoint.
        """

    def on_epoch_end(self, state: TrainState) -> None:
        """After training and validation of `state.epoch`, whose values are `state.history[-1]`.

        May freeze and unfreeze layers, the same ones on every rank.
        """

    def on_train_end(self, state: TrainState) -> None:
        """After the last epoch, when the best weights have been restored; not after an error."""
