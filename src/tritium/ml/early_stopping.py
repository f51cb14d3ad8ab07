"""Early stopping: its rule, which is a setting, and its state during a training (any process, rank)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tritium.errors import BadSetting
from tritium.gang.settings import as_int
from tritium.ml.fields import is_whole, setting


@dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """The rule to stop when `monitor` has not improved for `patience` epochs. Every rank stops after the same epoch."""

    patience: int = setting("Epochs without an improvement after which training stops.", 3, resume="any")
    monitor: str | None = setting(
        'The value of the history that counts. None: "validation_loss", or "loss" without validation.',
        None,
        resume="any",
    )
    min_delta: float = setting("By how much a value must be better to count as an improvement.", 0.0, resume="any")
    mode: Literal["min", "max"] = setting(
        'Whether smaller ("min") or larger ("max") values are better.', "min", resume="any"
    )
    restore_best: bool = setting(
        "Whether the model gets the weights of its best epoch, or of its last.", True, resume="any"
    )

    def __post_init__(self) -> None:
        wrong = []
        object.__setattr__(self, "patience", as_int(self.patience))
        if not is_whole(self.patience, 1):
            wrong.append(f"patience={self.patience!r} must be a whole number of at least 1.")
        if self.mode not in ("min", "max"):
            wrong.append(f"mode={self.mode!r} is unknown; choose 'min' or 'max'.")
        if wrong:
            raise BadSetting("EarlyStopping: " + " ".join(wrong), settings=wrong)

    def better(self, value: float, best: float | None) -> bool:
        """Return whether `value` improves on `best` (None: none yet). NaN never does; any number improves on NaN."""
        if math.isnan(value):
            return False
        if best is None or math.isnan(best):
            return True
        return value < best - self.min_delta if self.mode == "min" else value > best + self.min_delta


class EarlyStoppingState:
    """The best value and weights of a training so far. It gets the same values, and decides the same, on every rank."""

    def __init__(
        self,
        rule: EarlyStopping | None,
        epochs: int,
        take_weights: Callable[[], Mapping[str, Any]],
        put_weights: Callable[[Mapping[str, Any]], Any],
        tell: Callable[[str], Any] = lambda _: None,
    ) -> None:
        """Start without a best epoch.

        rule : with the name of its `monitor`; None: never stop.
        epochs : how many there are without it.
        take_weights : returns a copy of the model's weights, which `put_weights` loads into the model.
        """
        self.rule, self._epochs = rule, epochs
        self._take_weights, self._put_weights, self._tell = take_weights, put_weights, tell
        self._best: float | None = None
        self.weights: Mapping[str, Any] = {}
        """Those of the best epoch; empty before there is one, or where the model does not get them."""
        self._waited = 0
        self._continues = False

    @property
    def should_stop(self) -> bool:
        """Whether training should stop."""
        return self.rule is not None and self._waited >= self.rule.patience

    def on_epoch_end(self, entry: Mapping[str, Any]) -> None:
        """Compare an epoch's `entry` in the history with the best one."""
        if self.rule is None:
            return
        if self.rule.monitor not in entry:
            known = ", ".join(name for name, value in entry.items() if isinstance(value, float))
            raise BadSetting(
                f"early_stopping monitors {self.rule.monitor!r}; the history has {known}.", setting="early_stopping"
            )
        value = float(entry[str(self.rule.monitor)])
        if not self.rule.better(value, self._best):
            self._waited += 1
            return
        self._best, self._waited = value, 0
        if self.rule.restore_best:
            self.weights = self._take_weights()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, without the weights, which may be sharded."""
        rule = None if self.rule is None else dataclasses.asdict(self.rule)
        return {"rule": rule, "best": self._best, "waited": self._waited}

    def load_state_dict(self, state: Mapping[str, Any], epochs: int) -> None:
        """Continue after `epochs` epochs. If the rule is another one, start without a best epoch."""
        before, now = state.get("rule"), self.rule
        if now is None:
            return
        if before is not None and _same_best(before, now):
            self._best, self._waited, self._continues = state["best"], state["waited"], True
        elif 0 < epochs < self._epochs:
            self._tell(
                f"early stopping looks for the best epoch from epoch {epochs + 1} on: "
                f"{'there was none' if before is None else 'its rule was another one'} in the {epochs} before"
            )

    def load_weights(self, weights: Mapping[str, Any]) -> None:
        """Continue with these `weights` of a checkpoint, after `load_state_dict`; not by another rule."""
        if self._continues:
            self.weights = weights

    def stays_stopped(self, stopped: bool, state: Mapping[str, Any]) -> bool:
        """Return what the function of this name does, by the current rule."""
        return stays_stopped(stopped, state, self.rule)

    def restore_best(self) -> None:
        """Load the weights of the best epoch into the model, if the rule says so."""
        if self.weights and self.rule is not None and self.rule.restore_best:
            self._put_weights(self.weights)


def stays_stopped(stopped: bool, state: Mapping[str, Any], now: EarlyStopping | None) -> bool:
    """Return whether a training that was `stopped` before its last epoch still is by the current rule.

    A training that early stopping has ended continues when the rule was removed, is another one, or has more patience;
    one that a callback has ended does not.

    state : what `EarlyStoppingState.state_dict` returned then.
    """
    before = state.get("rule")
    if not stopped or before is None or state["waited"] < before["patience"]:
        return stopped
    return now is not None and _same_best(before, now) and state["waited"] >= now.patience


def _same_best(before: Mapping[str, Any], now: EarlyStopping) -> bool:
    """Return whether two rules are equal but for their patience, and so choose the same best epoch."""
    return dict(before) | {"patience": 0} == dataclasses.asdict(now) | {"patience": 0}
