"""Hooks in Keras's `fit` that keep the ranks one training, for every back end (rank)."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import WeakSet

import numpy as np

from tritium.errors import BadSetting
from tritium.frameworks.framework import Place


class KerasRanks(Protocol):
    """The ranks, as a back end connects them."""

    def broadcast(self, values: Sequence[Any]) -> list[Any]:
        """Return rank 0's arrays, on every rank. All ranks give arrays of the same shapes and dtypes."""
        ...

    def mean(self, gradients: Sequence[Any]) -> list[Any]:
        """Return the gradients, averaged over the ranks; None where one is None."""
        ...

    def check(self, model: Any) -> None:
        """Raise BadSetting where a model can't be trained by several ranks as it is compiled."""
        ...

    def agree(self) -> None:
        """Raise BadSetting, the same on every rank, where the ranks' latest batches don't go together."""
        ...


_connected: list[Callable[[Any], None]] = []


def begin(model: Any) -> None:
    """Give a built model rank 0's weights and optimizer state, as the first `fit` does. All ranks call it.

    Does nothing in a gang of one.
    """
    for give in _connected:
        give(model)


def connect_training(keras: Any, place: Place, ranks: KerasRanks) -> None:
    """Let every `fit`, `train_on_batch` and optimizer of this process train one model on all ranks."""
    begun: WeakSet[Any] = WeakSet()

    def give(model: Any) -> None:
        """Give the model rank 0's values. Called by all ranks at the same point of their programs."""
        ranks.check(model)
        variables = [*model.weights, *(model.optimizer.variables if model.optimizer is not None else ())]
        _agree(place, "The models", [(v.path, tuple(v.shape), str(v.dtype)) for v in variables])
        for variable, value in zip(variables, ranks.broadcast([v.value for v in variables]), strict=True):
            variable.assign(value)
        begun.add(model)

    _connected.append(give)
    _hook_apply(keras, ranks)
    _hook_fit(keras, place, ranks, give)
    train_on_batch = keras.Model.train_on_batch

    @functools.wraps(train_on_batch)
    def train_on_batch_together(model: Any, x: Any, *args: Any, **options: Any) -> Any:
        if model not in begun:
            if not model.built or not model.optimizer.built:
                model._symbolic_build(data_batch=(x, *args[:1], *(options[k] for k in ("y",) if k in options)))
            give(model)
        result = train_on_batch(model, x, *args, **options)
        ranks.agree()
        return result

    keras.Model.train_on_batch = train_on_batch_together


def _hook_apply(keras: Any, ranks: KerasRanks) -> None:
    """Let optimizers average gradients over the ranks first: in the outermost call, as optimizers contain others.

    On JAX that is `stateless_apply`. There a LossScaleOptimizer decides by the gradients whether it calls `apply`, and
    must decide the same on every rank.
    """
    within = threading.local()

    @contextmanager
    def averaged(grads: Any) -> Iterator[Any]:
        """Yield the gradients for the call in the block: their means where it is the outermost."""
        if getattr(within, "apply", False):
            yield grads
            return
        within.apply = True
        try:
            yield ranks.mean(list(grads))
        finally:
            within.apply = False

    def hooked(apply: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(apply)
        def apply_mean(optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
            with averaged(grads) as means:
                return apply(optimizer, means, trainable_variables)

        return apply_mean

    def hooked_stateless(apply: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(apply)
        def apply_mean(optimizer: Any, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
            with averaged(grads) as means:
                return apply(optimizer, optimizer_variables, means, trainable_variables)

        return apply_mean

    for optimizer in (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer.apply = hooked(optimizer.apply)
        optimizer.stateless_apply = hooked_stateless(optimizer.stateless_apply)


def _hook_fit(keras: Any, place: Place, ranks: KerasRanks, begin: Callable[[Any], None]) -> None:
    fit = keras.Model.fit

    class SharedLogs(keras.callbacks.Callback):  # type: ignore[misc]
        """Comes before the user's callbacks, which then see the same logs on every rank and decide alike."""

        async_safe = True

        def __init__(self, data: Any) -> None:
            super().__init__()
            self._data = data
            self._logs: dict[str, float] = {}

        def on_train_begin(self, logs: Any = None) -> None:
            _agree(place, "The steps of an epoch", [self.params.get("steps")])
            begin(self.model)

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if hasattr(self._data, "set_epoch"):
                self._data.set_epoch(epoch)

        def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
            ranks.agree()
            self._logs = _averaged(place, logs or {})
            if logs is not None:
                logs.update(self._logs)

        def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
            if logs is not None:
                logs.update(self._logs)

    @functools.wraps(fit)
    def fit_together(model: Any, x: Any = None, *args: Any, **options: Any) -> Any:
        if place.rank != 0 and len(args) < 4:
            options.setdefault("verbose", 0)
        # The batches of such an input belong to the steps of all ranks, so Keras must not shuffle them.
        if hasattr(x, "set_epoch"):
            options["shuffle"] = False
            x.set_epoch(options.get("initial_epoch", 0))
        asked = args[4] if len(args) > 4 else options.get("callbacks")
        if isinstance(asked, keras.callbacks.CallbackList):
            together = SharedLogs(x)
            together.set_params(asked.params)
            together.set_model(model)
            asked.callbacks.insert(0, together)
            return fit(model, x, *args, **options)
        listed = asked if isinstance(asked, list | tuple) else [] if asked is None else [asked]
        callbacks = [SharedLogs(x), *listed]
        if len(args) > 4:
            return fit(model, x, *args[:4], callbacks, *args[5:], **options)
        return fit(model, x, *args, **{**options, "callbacks": callbacks})

    keras.Model.fit = fit_together


def _averaged(place: Place, logs: Mapping[str, Any]) -> dict[str, float]:
    """Return every number that a rank has logged, averaged over the ranks that have it; the same on every rank."""
    numbers = {name: float(value) for name, value in logs.items() if isinstance(value, int | float | np.number)}
    every = place.gather(numbers)
    names = dict.fromkeys(name for logged in every for name in logged)
    return {name: float(np.mean([logged[name] for logged in every if name in logged])) for name in names}


def _agree(place: Place, what: str, mine: Sequence[Any]) -> None:
    """Raise BadSetting, the same on every rank, where ranks differ: their collectives would wait for ever."""
    every = place.gather(list(mine))
    for rank, theirs in enumerate(every):
        if theirs == every[0]:
            continue
        at = next((n for n, pair in enumerate(zip(every[0], theirs, strict=False)) if pair[0] != pair[1]), None)
        both = (len(every[0]), len(theirs)) if at is None else (every[0][at], theirs[at])
        raise BadSetting(
            f"{what} of rank 0 and rank {rank} differ: {both[0]} and {both[1]}. Every rank must make "
            'the same model and take as many steps: take batches from world.shard("train").keras(…), or give '
            "steps_per_epoch=."
        )
