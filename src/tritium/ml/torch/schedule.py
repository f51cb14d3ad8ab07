"""The learning rate schedule of a training, also of one that continues from a checkpoint (rank)."""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tritium.arguments import name_of, needed_arguments
from tritium.errors import BadSetting
from tritium.ml.torch.settings import TorchSettings


def is_per_step(settings: TorchSettings) -> bool:
    """Return whether `lr_scheduler` takes (optimizer, steps), and so is stepped after each optimizer step."""
    return settings.lr_scheduler is not None and len(needed_arguments(settings.lr_scheduler)) == 2


def make_scheduler(settings: TorchSettings, optimizer: Any, *steps: int) -> Any:
    """Return the scheduler of an optimizer. Raises BadSetting when `lr_scheduler` returns something else."""
    scheduler = settings.lr_scheduler(optimizer, *steps)
    kind = type(scheduler).__name__
    if not hasattr(scheduler, "step") or not hasattr(scheduler, "state_dict"):
        raise BadSetting(
            f"lr_scheduler={name_of(settings.lr_scheduler)} returned a {kind}, and must return one scheduler of "
            "torch.optim.lr_scheduler. Several become one by SequentialLR or ChainedScheduler.",
            setting="lr_scheduler",
        )
    is_plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    if (needed := needed_arguments(scheduler.step)) and (steps or not is_plateau):
        fix = (
            f"Step it after each epoch, with the loss: lr_scheduler=lambda optimizer: {kind}(optimizer)"
            if is_plateau
            else "Give one that is stepped without"
        )
        raise BadSetting(
            f"lr_scheduler={name_of(settings.lr_scheduler)} makes a {kind} that is stepped after each "
            f"{'optimizer step' if steps else 'epoch'}, and its step needs {', '.join(needed)}. {fix}.",
            setting="lr_scheduler",
        )
    return scheduler


class Schedule:
    """The learning rate scheduler, stepped after each epoch, or after each step if it counts steps.

    The place of a training in its schedule depends only on the share of it that is done: a scheduler that counts steps
    is made for all steps of the current epochs and world size. When either has changed since the checkpoint, a new
    scheduler is stepped to that place, from the options that the optimizer began with.

    A scheduler has the groups that the optimizer held when the training began. One that a callback adds later keeps its
    own options: torch's schedulers keep a value per group from when they were made, and most can't take another one
    (LambdaLR and OneCycleLR fail, StepLR continues with it, CosineAnnealingLR leaves it alone).
    """

    def __init__(
        self,
        settings: TorchSettings,
        optimizer: torch.optim.Optimizer,
        steps: Callable[[], int],
        tell: Callable[[str], Any] = lambda _: None,
    ) -> None:
        """Make no scheduler yet. `steps` is called when the first epoch begins, and returns its batches per rank."""
        self._settings, self._optimizer, self._steps, self._tell = settings, optimizer, steps, tell
        self._per_step = is_per_step(settings)
        self._scheduler: Any = None
        self._described = ""
        """The kind and settings of the scheduler, as `_description` tells them."""
        self._restored: dict[str, Any] | None = None
        self._at = self._of = 0
        """Steps taken, and in all, of a scheduler that counts them."""
        self._from = self._span = self._taken = 0
        self._groups = 1
        self._plain: list[dict[str, Any]] = []
        """The options of each group without a scheduler."""
        self._fresh: list[dict[str, Any]] = []
        """The options of each group with a new scheduler."""
        self._tells_of_added = True

    def on_train_start(self) -> None:
        """Record the options that a schedule begins with, and make a scheduler that counts epochs.

        Called after the callbacks' `on_train_start`, before the optimizer's state is restored.
        """
        self._plain = _options(self._optimizer)
        if self._settings.lr_scheduler is not None and not self._per_step:
            self._scheduler = make_scheduler(self._settings, self._optimizer)
            self._described = _description(self._scheduler)
        self._fresh = _options(self._optimizer)

    @contextmanager
    def _as_begun(self) -> Iterator[None]:
        """Hide the groups of the optimizer that were added since the training began."""
        groups = self._optimizer.param_groups
        if (added := len(groups) - len(self._fresh)) <= 0:
            yield
            return
        if self._tells_of_added:
            self._tells_of_added = False
            self._tell(
                f"lr_scheduler leaves the learning rate of {added} group{'s' * (added > 1)} of the optimizer as it is, "
                "as a callback has added them to those that it was made for"
            )
        self._optimizer.param_groups = groups[: len(self._fresh)]
        try:
            yield
        finally:
            self._optimizer.param_groups = groups

    # ---- continuing from a checkpoint

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {
            "scheduler": None if self._scheduler is None else self._scheduler.state_dict(),
            "made": self._described,
            "at": self._at,
            "of": self._of,
        }

    def load_state_dict(self, state: dict[str, Any], history: Sequence[dict[str, Any]], epochs: int) -> None:
        """Continue from a checkpoint, after the optimizer's state was restored. A scheduler of steps is made later.

        `epochs`: how many epochs the training was to have then.
        """
        self._restored = state
        if self._per_step:
            return
        same = (state["made"], epochs) == (self._described, self._settings.epochs)
        if self._scheduler is None and state["scheduler"] is None:
            return
        if self._scheduler is not None and same:
            self._scheduler.load_state_dict(state["scheduler"])
            return
        steps = [] if self._scheduler is None else [lambda entry=entry: self._step(entry) for entry in history]
        self._replay(_options(self._optimizer), steps)
        self._tell(
            f"the learning rate is that of {self._settings.epochs} epochs after {len(history)} of them (its schedule "
            f"was made for {epochs} before)"
        )

    def _make(self, total: int, start: int) -> None:
        """Make the scheduler over `total` steps, at step `start`."""
        saved, self._of = self._restored, total
        then = _options(self._optimizer)
        if saved is not None:
            _put(self._optimizer, self._fresh)
        with self._as_begun():
            self._scheduler = make_scheduler(self._settings, self._optimizer, total)
        self._described = _description(self._scheduler)
        if saved is None:
            return
        if (saved["made"], saved["of"], saved["at"]) == (self._described, total, start):
            self._scheduler.load_state_dict(saved["scheduler"])
            _put(self._optimizer, then)
        else:
            self._replay(then, [self._scheduler.step] * start)
            self._tell(
                f"the learning rate is that of a schedule over {total} optimizer steps after {start} of them (it was "
                f"one over {saved['of']}, after {saved['at']})"
            )
        self._at = start

    def _replay(self, then: list[dict[str, Any]], steps: Sequence[Callable[[], Any]]) -> None:
        """Step a new scheduler from the options that the optimizer began with; restore those that it never changes."""
        if not self._per_step:  # Else the scheduler has just been made of them.
            _put(self._optimizer, self._fresh)
        changed = {"lr"} | (set() if self._scheduler is not None else {"momentum", "betas"})
        with self._as_begun(), warnings.catch_warnings():
            # Torch wants an optimizer step before each; they were taken earlier.
            warnings.simplefilter("ignore")
            for step in (lambda: None, *steps):
                step()
                for group, plain in zip(self._optimizer.param_groups, self._plain, strict=False):
                    changed |= {k for k, v in group.items() if k not in changed and _differs(v, plain.get(k, v))}
        for group, begun, before in zip(self._optimizer.param_groups, self._fresh, then, strict=False):
            group.update({k: v for k, v in before.items() if k in begun and k not in changed})

    # ---- while training

    def on_epoch_start(self, epoch: Any) -> None:
        """Make a scheduler that counts steps, now that their number is known, and step it to the epoch's beginning."""
        if not self._per_step:
            return
        together = self._settings.gradient_accumulation
        steps = -(-self._steps() // together)
        done = min(steps, -(-epoch.first // together))
        self._from, self._span, self._taken = epoch.number * steps + done, steps - done, 0
        # An epoch that continues at another world size may have a step more or less than its share of the schedule.
        self._groups = max(1, -(-(epoch.steps - epoch.first) // together))
        if self._scheduler is None:
            self._make(steps * self._settings.epochs, self._from)
        self._step_to(self._from)

    def on_step(self) -> None:
        """Step a scheduler that counts steps, after each optimizer step."""
        if self._per_step:
            self._taken += 1
            self._step_to(self._from + self._taken * self._span // self._groups)

    def _step_to(self, place: int) -> None:
        with self._as_begun():
            while self._at < place:
                self._scheduler.step()
                self._at += 1

    def on_epoch_end(self, entry: dict[str, Any]) -> None:
        """Step a scheduler that counts epochs, by the epoch's `entry` in the history."""
        if self._scheduler is not None and not self._per_step:
            with self._as_begun():
                self._step(entry)

    def _step(self, entry: dict[str, Any]) -> None:
        if isinstance(self._scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            self._scheduler.step(entry.get("validation_loss", entry["loss"]))
        else:
            self._scheduler.step()

    def learning_rate(self) -> float:
        """Return the learning rate of the first group of parameters."""
        return float(self._optimizer.param_groups[0]["lr"])


def _options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return a copy of what each group holds beside its parameters."""
    return [{k: copy.deepcopy(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def _put(optimizer: torch.optim.Optimizer, options: Sequence[dict[str, Any]]) -> None:
    """Set these options in the groups, and delete all others."""
    for group, wanted in zip(optimizer.param_groups, options, strict=False):
        for name in [name for name in group if name != "params" and name not in wanted]:
            del group[name]
        group.update(copy.deepcopy(wanted))


def _differs(one: Any, other: Any) -> bool:
    if isinstance(one, list) or one is other:  # A list holds the parameters.
        return False
    return bool(torch.as_tensor(one != other).any())


def _description(scheduler: Any) -> str:
    """Return a digest of a new scheduler's state, equal for the same kind and settings."""
    state = repr(sorted(scheduler.state_dict().items()))
    return f"{type(scheduler).__name__} {hashlib.sha256(state.encode()).hexdigest()[:16]}"
