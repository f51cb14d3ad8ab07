"""`horovod.tensorflow.elastic`: `run`, `TensorFlowKerasState` and `TensorFlowState` (rank)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import tensorflow as tf

from tritium_compat.horovod import context
from tritium_compat.horovod._keras import variables as of_keras
from tritium_compat.horovod._keras.elastic import ModelState
from tritium_compat.horovod.elastic import ObjectState, run_fn
from tritium_compat.horovod.errors import HorovodInternalError
from tritium_compat.horovod.torch.elastic import reset
from tritium_compat.horovod.torch.functions import broadcast_object


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function whose first argument is a state: it continues from the last commit, see `run_fn`."""

    @functools.wraps(func)
    def call(state: Any, *args: Any, **options: Any) -> Any:
        try:
            return func(state, *args, **options)
        except tf.errors.UnknownError as error:  # of a collective within a tf.function
            if HorovodInternalError.__name__ in str(error):
                raise HorovodInternalError(str(error)) from error
            raise

    return run_fn(call, reset)


class TensorFlowKerasState(ModelState):
    """A model of Keras, its optimizer, and values that are attributes by their names."""

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        """Make a state of a model that is built. backend : has no effect."""
        super().__init__(model, optimizer, **kwargs)


class TensorFlowState(ObjectState):
    """Variables of TensorFlow, and values that are attributes by their names."""

    def __init__(self, variables: Iterable[Any], session: Any = None, **kwargs: Any) -> None:
        """Make a state of variables in eager mode. session : is refused, being one of TensorFlow 1."""
        if session is not None:
            raise NotImplementedError(
                "TensorFlowState(session=…): sessions of TensorFlow 1 have no elastic state. Use eager mode."
            )
        self.variables = list(variables)
        super().__init__(broadcast_object, lambda: context.current().rank, **kwargs)
        self._values = of_keras.values(self.variables)

    def save(self) -> None:
        """Save all in memory."""
        self._values = of_keras.values(self.variables)
        super().save()

    def restore(self) -> None:
        """Go back to what was last saved."""
        for variable, value in zip(self.variables, self._values, strict=True):
            variable.assign(value)
        super().restore()

    def sync(self) -> None:
        """Take rank 0's state, and save it."""
        of_keras.broadcast(self.variables, 0)
        super().sync()
        self.save()

    def kept(self) -> Mapping[str, Any]:
        """Return what was last saved."""
        return {"values": self._saved_state, "variables": self._values}

    def take_kept(self, kept: Mapping[str, Any]) -> None:
        """Take what `kept` returned as what was last saved."""
        super().take_kept(kept)
        self._values = list(kept["variables"])


__all__ = ["TensorFlowKerasState", "TensorFlowState", "run"]
