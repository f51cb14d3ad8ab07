"""What goes along with the steps: learning rate, early stopping, what is shown (rank)."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tritium.ml.settings import EarlyStopping, TorchSettings

_SHOW_SECONDS = 0.5


class Pace:
    """The learning rate scheduler, stepped after each epoch, or after each step if it was made for that.

    Where a training stands in its schedule depends on the share of it that is done, and on nothing else: a scheduler
    that counts steps is one over all steps of the epochs and the world size of now. When either has changed since the
    checkpoint, a new scheduler is stepped to that place, from what the optimizer begins with.

    A scheduler has the groups that the optimizer held when the training began. One that a callback adds later keeps its
    own options: torch's schedulers keep a value per group from when they were made, and most can't take another one
    (LambdaLR and OneCycleLR fail, StepLR goes on with it, CosineAnnealingLR leaves it alone).
    """

    def __init__(
        self,
        settings: TorchSettings,
        optimizer: torch.optim.Optimizer,
        steps: Callable[[], int],
        tell: Callable[[str], Any] = lambda _: None,
    ) -> None:
        """`steps` gives the batches of a whole epoch on each rank, and is called when the first epoch begins."""
        self._settings, self._optimizer, self._steps, self._tell = settings, optimizer, steps, tell
        self._per_step = settings.scheduler_per_step()
        self._scheduler: Any = None
        self._made = ""  # what the scheduler was like when it was new
        self._restored: dict[str, Any] | None = None
        self._at = self._of = 0  # steps of a scheduler that counts them
        self._from = self._span = self._taken = 0
        self._groups = 1
        self._plain: list[dict[str, Any]] = []  # the options of each group without a scheduler
        self._fresh: list[dict[str, Any]] = []  # and with a new one
        self._untold = True

    def begin(self) -> None:
        """After `on_train_start`, before the optimizer's state is put back: note what a schedule begins with."""
        self._plain = _options(self._optimizer)
        if self._settings.lr_scheduler is not None and not self._per_step:
            self._scheduler = self._settings.make_scheduler(self._optimizer)
            self._made = _described(self._scheduler)
        self._fresh = _options(self._optimizer)

    @contextmanager
    def _as_begun(self) -> Iterator[None]:
        """The optimizer without the groups that were added since the training began."""
        groups = self._optimizer.param_groups
        if (added := len(groups) - len(self._fresh)) <= 0:
            yield
            return
        if self._untold:
            self._untold = False
            self._tell(
                f"lr_scheduler leaves the learning rate of {added} group{'s' * (added > 1)} of the optimizer as it is, "
                "as a callback has added them to those that it was made for"
            )
        self._optimizer.param_groups = groups[: len(self._fresh)]
        try:
            yield
        finally:
            self._optimizer.param_groups = groups

    # ---- going on where a checkpoint was

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {
            "scheduler": None if self._scheduler is None else self._scheduler.state_dict(),
            "made": self._made,
            "at": self._at,
            "of": self._of,
            "epochs": self._settings.epochs,
        }

    def load_state_dict(self, state: dict[str, Any], history: Sequence[dict[str, Any]]) -> None:
        """Go on as then, after the optimizer's state was put back. A scheduler that counts steps is yet to be made."""
        self._restored = state
        if self._per_step:
            return
        same = (state["made"], state["epochs"]) == (self._made, self._settings.epochs)
        if self._scheduler is None and state["scheduler"] is None:
            return
        if self._scheduler is not None and same:
            self._scheduler.load_state_dict(state["scheduler"])
            return
        steps = [] if self._scheduler is None else [lambda entry=entry: self._step(entry) for entry in history]
        self._replay(_options(self._optimizer), steps)
        self._tell(
            f"the learning rate is that of {self._settings.epochs} epochs after {len(history)} of them (its schedule "
            f"was made for {state['epochs']} before)"
        )

    def _make(self, total: int, start: int) -> None:
        """The scheduler over `total` steps, at step `start`."""
        saved, self._of = self._restored, total
        then = _options(self._optimizer)
        if saved is not None:
            _put(self._optimizer, self._fresh)
        with self._as_begun():
            self._scheduler = self._settings.make_scheduler(self._optimizer, total)
        self._made = _described(self._scheduler)
        if saved is None:
            return
        if (saved["made"], saved["of"], saved["at"]) == (self._made, total, start):
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
        """Step a new scheduler, from what the optimizer began with; options that it never changes are those of then."""
        if not self._per_step:  # else the scheduler has just been made
            _put(self._optimizer, self._fresh)
        changed = {"lr"} | (set() if self._scheduler is not None else {"momentum", "betas"})
        with self._as_begun(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch wants an optimizer step before each: those were taken earlier
            for step in (lambda: None, *steps):
                step()
                for group, plain in zip(self._optimizer.param_groups, self._plain, strict=False):
                    changed |= {k for k, v in group.items() if k not in changed and _differs(v, plain.get(k, v))}
        for group, begun, before in zip(self._optimizer.param_groups, self._fresh, then, strict=False):
            group.update({k: v for k, v in before.items() if k in begun and k not in changed})

    # ---- while training

    def before_epoch(self, epoch: Any) -> None:
        """A scheduler that counts steps is made when their number is known, and set to where this epoch begins."""
        if not self._per_step:
            return
        together = self._settings.gradient_accumulation
        steps = -(-self._steps() // together)
        done = min(steps, -(-epoch.first // together))
        self._from, self._span, self._taken = epoch.number * steps + done, steps - done, 0
        # An epoch that goes on at another world size may have a step more or less than its share of the schedule.
        self._groups = max(1, -(-(epoch.steps - epoch.first) // together))
        if self._scheduler is None:
            self._make(steps * self._settings.epochs, self._from)
        self._step_to(self._from)

    def after_step(self) -> None:
        """After each optimizer step."""
        if self._per_step:
            self._taken += 1
            self._step_to(self._from + self._taken * self._span // self._groups)

    def _step_to(self, place: int) -> None:
        with self._as_begun():
            while self._at < place:
                self._scheduler.step()
                self._at += 1

    def after_epoch(self, entry: dict[str, Any]) -> None:
        """After each epoch, with what it came to."""
        if self._scheduler is not None and not self._per_step:
            with self._as_begun():
                self._step(entry)

    def _step(self, entry: dict[str, Any]) -> None:
        if isinstance(self._scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            self._scheduler.step(entry.get("validation_loss", entry["loss"]))
        else:
            self._scheduler.step()

    def learning_rate(self) -> float:
        """Of the first group of parameters."""
        return float(self._optimizer.param_groups[0]["lr"])


def _options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """A copy of what each group holds beside its parameters."""
    return [{k: copy.deepcopy(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def _put(optimizer: torch.optim.Optimizer, options: Sequence[dict[str, Any]]) -> None:
    """Give the groups these options and no others."""
    for group, wanted in zip(optimizer.param_groups, options, strict=False):
        for name in [name for name in group if name != "params" and name not in wanted]:
            del group[name]
        group.update(copy.deepcopy(wanted))


def _differs(one: Any, other: Any) -> bool:
    if isinstance(one, list) or one is other:  # the parameters
        return False
    return bool(torch.as_tensor(one != other).any())


def _described(scheduler: Any) -> str:
    """A name for the state of a new scheduler: two that are equal are of the same kind and settings."""
    state = repr(sorted(scheduler.state_dict().items()))
    return f"{type(scheduler).__name__} {hashlib.sha256(state.encode()).hexdigest()[:16]}"


class Stopper:
    """Early stopping: what it sees is equal on every rank, and so is what it decides."""

    def __init__(
        self, settings: TorchSettings, module: torch.nn.Module, tell: Callable[[str], Any] = lambda _: None
    ) -> None:
        self._rule, self._epochs = stopping_rule(settings), settings.epochs
        self._module, self._tell = module, tell
        self._best: float | None = None
        self._weights: dict[str, torch.Tensor] = {}
        self._waited = 0

    @property
    def enough(self) -> bool:
        """Whether training should stop."""
        return self._rule is not None and self._waited >= self._rule.patience

    def look_at(self, entry: dict[str, Any]) -> None:
        """An epoch's values."""
        if self._rule is None:
            return
        value = float(entry[str(self._rule.monitor)])
        if not self._rule.better(value, self._best):
            self._waited += 1
            return
        self._best, self._waited = value, 0
        if self._rule.restore_best:
            self._weights = {k: v.detach().cpu().clone() for k, v in self._module.state_dict().items()}

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        rule = None if self._rule is None else dataclasses.asdict(self._rule)
        return {"rule": rule, "best": self._best, "waited": self._waited, "weights": self._weights}

    def load_state_dict(self, state: Mapping[str, Any], epochs: int) -> None:
        """Go on as after so many epochs; by another rule nothing was best yet, and nothing is waited for."""
        before, now = state.get("rule"), self._rule
        if now is None:
            return
        if before is not None and _same_best(before, now):
            self._best, self._waited, self._weights = state["best"], state["waited"], state["weights"]
        elif 0 < epochs < self._epochs:
            self._tell(
                f"early stopping looks for the best epoch from epoch {epochs + 1} on: "
                f"{'there was none' if before is None else 'its rule was another one'} in the {epochs} before"
            )

    def restore_best(self) -> None:
        """Gives the module the weights of its best epoch, if that is asked for."""
        if self._weights and self._rule is not None and self._rule.restore_best:
            self._module.load_state_dict(self._weights)


def stopping_rule(settings: TorchSettings) -> EarlyStopping | None:
    """The rule of early stopping, with the name of the value that counts."""
    rule = settings.stopping()
    if rule is None or rule.monitor is not None:
        return rule
    return dataclasses.replace(rule, monitor="validation_loss" if settings.validation is not None else "loss")


def stays_stopped(saved: Mapping[str, Any], settings: TorchSettings) -> bool:
    """Whether a training that was `stopped` before its last epoch still is by the settings of now.

    What early stopping has ended goes on when there is none any more, its rule is another or its patience longer; what
    a callback has ended does not.
    """
    state = saved["stopper"]
    before, now = state.get("rule"), stopping_rule(settings)
    if not saved["stopped"] or before is None or state["waited"] < before["patience"]:
        return bool(saved["stopped"])
    return now is not None and _same_best(before, now) and state["waited"] >= now.patience


def _same_best(before: Mapping[str, Any], now: EarlyStopping) -> bool:
    """Whether two rules call the same epochs best, and keep the weights of those; they may differ in patience."""
    return dict(before) | {"patience": 0} == dataclasses.asdict(now) | {"patience": 0}


class Show:
    """Progress, at most twice a second while steps are taken, and once an epoch."""

    def __init__(self, settings: TorchSettings, world: Any) -> None:
        self._settings, self._world = settings, world
        self._rows = 0
        self._last = 0.0

    def step(self, epoch: Any, batches: list[Any], loss: torch.Tensor) -> None:
        """After an optimizer step over these batches."""
        self._rows += sum(batch.rows for batch in batches)
        now = time.monotonic()
        if self._settings.verbose and now - self._last >= _SHOW_SECONDS:
            self._last = now
            self._log(epoch=epoch.number, step=batches[-1].step, loss=loss)

    def epoch(self, epoch: Any, entry: dict[str, Any]) -> None:
        """After an epoch, which has the history's `entry`: once for all ranks."""
        if self._settings.verbose and self._world.rank == 0:
            shown = {k: v for k, v in entry.items() if isinstance(v, float) and k not in ("seconds", "rows_per_second")}
            self._log(epoch=epoch.number, step=epoch.steps - 1, steps=epoch.steps, **shown)

    def _log(self, **values: Any) -> None:
        self._world.log(epochs=self._settings.epochs, **(values | {"rows": self._rows}))
