"""`Callback` and `TrainState`, by which the training loop calls the user's own code (rank)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class TrainState:
    """What a callback is called with. The objects are the loop's own; change them on every rank in the same way."""

    module: Any
    """The `torch.nn.Module` itself, not the DDP around it."""
    optimizer: Any
    rank: int
    size: int
    device: Any
    epoch: int = 0
    """The last epoch that has ended, from 1, as in `history` and in the progress display; 0 before the first."""
    step: int = 0
    """How many optimizer steps have been taken, over all epochs; with `precision="fp16"` those left out count, too."""
    loss: Any = None
    """The mean loss over this rank's rows of the last batch, an array without dimensions on `device`."""
    history: list[dict[str, Any]] = field(default_factory=list)
    """One dict per epoch, the same on every rank."""
    stop: bool = False
    """If set to True in `on_epoch_end`, on any rank, training ends after this epoch on all of them."""


class Callback:
    """The base class of callbacks, which every rank calls in the order of the list.

    Any object with the methods `on_train_start`, `on_epoch_end` and `on_train_end` will do; the others are called where
    there are any. Because every rank calls it, a callback may use collectives
    (`torch.distributed`, `tr.world().gather`); one that prints or writes a file should check `state.rank == 0` first.
    A callback is copied to the ranks, and what it collects stays there. An exception in it ends the training.
    """

    def on_train_start(self, state: TrainState) -> None:
        """Run before the first step; the module is on its device, and equal on every rank.

        In a training that continues, weights, history and epoch are those of the checkpoint. Module and optimizer are
        restored from it after this call, as it holds what this method did when the training began.
        """

    def on_step_end(self, state: TrainState) -> None:
        """Run after each optimizer step, which is `state.step`. Reading `state.loss` on a GPU waits for the step."""

    def on_epoch_end(self, state: TrainState) -> None:
        """Run after training and validation of `state.epoch`, whose values are `state.history[-1]`.

        May freeze and unfreeze layers, the same ones on every rank.
        """

    def on_train_end(self, state: TrainState) -> None:
        """Run after the last epoch, when the best weights have been restored; not after an error."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of this callback on this rank: numbers, texts, arrays, lists and dicts."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, in a training that continues, after `on_train_start`."""


def at_steps(callback: Any) -> bool:
    """Return whether this callback does anything after a step."""
    return _overrides(callback, "on_step_end")


def keeps_state(callback: Any) -> bool:
    """Return whether a checkpoint keeps the state of this callback."""
    return _overrides(callback, "state_dict")


def _overrides(callback: Any, method: str) -> bool:
    function = getattr(type(callback), method, None)
    return function is not None and function is not getattr(Callback, method)
