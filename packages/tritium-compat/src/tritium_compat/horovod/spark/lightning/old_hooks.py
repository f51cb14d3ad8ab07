"""Hooks of Lightning 1 that Lightning 2 refuses or no longer calls, for modules and callbacks that have them (rank)."""

from __future__ import annotations

from typing import Any

_EPOCH_ENDS = {  # a hook with the outputs of all steps → the step, and the hook that is called in its place
    "training_epoch_end": ("training_step", "on_train_epoch_end"),
    "validation_epoch_end": ("validation_step", "on_validation_epoch_end"),
}


def with_epoch_ends(module: Any) -> Any:
    """Let `training_epoch_end` and `validation_epoch_end` be called with what the steps have returned."""
    own = type(module)
    added: dict[str, Any] = {}
    for old, (step, new) in _EPOCH_ENDS.items():
        if callable(getattr(own, old, None)):
            added |= _called(own, old, step, new)
    if added:
        module.__class__ = type(own.__name__, (own,), {**added, "__module__": own.__module__})
    return module


def _called(own: Any, old: str, step: str, new: str) -> dict[str, Any]:
    kept = f"_outputs_of_{step}"

    def step_and_keep(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = getattr(own, step)(self, *args, **kwargs)
        if result is not None:
            vars(self).setdefault(kept, []).append(result)
        return result

    def epoch_end(self: Any) -> None:
        getattr(own, new)(self)
        getattr(own, old)(self, vars(self).pop(kept, []))

    return {old: None, step: step_and_keep, new: epoch_end}


def old_callbacks(base: Any, callbacks: Any) -> Any:
    """Return a callback that calls `on_init_start`, `on_init_end` and `on_epoch_end` of those that have them."""

    class OldHooks(base):  # type: ignore[misc]
        def _call(self, hook: str, *args: Any) -> None:
            for callback in callbacks:
                method = getattr(callback, hook, None)
                if callable(method):
                    method(*args)

        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            self._call("on_init_start", trainer)
            self._call("on_init_end", trainer)

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            self._call("on_epoch_end", trainer, pl_module)

        def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            self._call("on_epoch_end", trainer, pl_module)

    return OldHooks()
