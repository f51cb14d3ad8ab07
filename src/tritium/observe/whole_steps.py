"""The place of logged numbers in a whole training, for trackers that know one axis (driver)."""

from __future__ import annotations

from tritium.events import Logged


class WholeSteps:
    """Counts the steps of runs over their epochs, by the steps that an epoch has."""

    def __init__(self) -> None:
        self._steps: dict[str, int] = {}
        """Run → the steps of an epoch, once that is known."""

    def step(self, event: Logged) -> int | None:
        """Return the step of the whole training, or else the epoch; None where neither was logged."""
        if event.steps is not None:
            self._steps[event.run] = event.steps
        before = (event.epoch or 0) * self._steps.get(event.run, 0)
        return event.epoch if event.step is None else before + event.step

    def forget(self, run: str) -> None:
        """Forget a run that has ended."""
        self._steps.pop(run, None)
