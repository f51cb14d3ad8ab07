"""`FunctionEngine`: a state of any kind and a function that predicts with it, as a model (any process)."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from tritium import ship
from tritium.errors import MALFORMED, BadData, BadSetting, ModelError
from tritium.model.engine import Buffer, Engine, Maker, Parts, Weights
from tritium.model.forms import WHOLE, Requirement, list_of
from tritium.model.signature import Output

if TYPE_CHECKING:
    import numpy as np

    from tritium.model.engine import Arrays

_ALIGNED_BYTES = 64
_ALONE = "prediction"


@dataclass
class Functions:
    """A trained state, and the function (state, batch) -> predictions."""

    state: Any
    predict: Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Stateless:
    """A function of the batch alone, as one of a state that is None."""

    function: Callable[[Any], Any]

    def __call__(self, state: None, batch: Any) -> Any:
        return self.function(batch)


@dataclass(frozen=True)
class Buffers(Weights):
    """The memory of a state's arrays, one after another."""

    buffers: Sequence[memoryview]

    def stream(self) -> Iterator[memoryview]:
        """Yield the arrays' memory as it is, each filled up to a multiple of 64 bytes."""
        for buffer in self.buffers:
            if buffer.nbytes:
                yield buffer
            if rest := -buffer.nbytes % _ALIGNED_BYTES:
                yield memoryview(bytes(rest))


class FunctionEngine(Engine):
    """The engine of `Functions`. The arrays in the state are one file, all else is a pickle by value."""

    name = "function"
    framework = None
    weights_file = "state.bin"
    code_file = "state.pkl"
    module_class = "tritium.model.engines.function.Functions"
    trusted = ()
    facts: ClassVar[Mapping[str, Requirement]] = {"buffers": list_of(WHOLE)}
    transformer = "tritium.ml.function.model:FunctionModel"

    module: Functions

    def __init__(self, module: Functions | Callable[[Any], Any]) -> None:
        self.module = module if isinstance(module, Functions) else Functions(None, Stateless(module))

    def save(self, *, by_value: bool) -> Parts:
        buffers: list[pickle.PickleBuffer] = []
        code = ship.pickle((self.module.state, self.module.predict), buffers=buffers.append)
        views = [buffer.raw() for buffer in buffers]
        return Parts(Buffers(views), code, {"buffers": [view.nbytes for view in views]})

    @classmethod
    def restore(
        cls, weights: Buffer, facts: Mapping[str, Any], by: Maker | bytes, *, device: str | None = None
    ) -> FunctionEngine:
        if isinstance(by, Maker):
            raise ModelError(f"A model of {cls.name!r} is saved by value, and this one names {by.origin!r}.")
        if not by:
            raise ModelError(f"The manifest names no file with the model's state: {cls.code_file}.")
        start, views, whole = 0, [], memoryview(weights)
        for size in facts["buffers"]:
            views.append(whole[start : start + size])
            start += size + -size % _ALIGNED_BYTES
        if start != len(whole):
            raise ModelError(f"The state's arrays are cut short or damaged: {len(whole)} bytes, and not {start}.")
        try:
            state, predict = pickle.loads(by, buffers=views)
        except (pickle.UnpicklingError, EOFError, *MALFORMED) as error:
            raise ModelError(f"The state can't be restored: {type(error).__name__}: {error}.") from error
        return cls(Functions(state, predict))

    @contextmanager
    def on(self, device: str | None) -> Iterator[FunctionEngine]:
        self.check_device(device or "cpu")
        yield self

    def call(self, batch: Arrays, outputs: Sequence[str]) -> Arrays:
        arrays = self._predicted(batch)
        if len(outputs) == 1 and list(arrays) == [_ALONE]:  # One array has no name of its own.
            return {outputs[0]: arrays[_ALONE]}
        if not set(outputs) <= set(arrays):
            raise ModelError(f"predict should return the arrays {list(outputs)}, and returned {sorted(arrays)}.")
        return {name: arrays[name] for name in outputs}

    def describe(self, batch: Arrays) -> tuple[Output, ...]:
        rows = len(next(iter(batch.values())))
        arrays = self._predicted(batch)
        for name, array in arrays.items():
            if array.ndim == 0 or len(array) != rows or array.dtype.kind not in "fiub":
                raise BadData(
                    f"predict returned {name!r} as {array.dtype} of shape {list(array.shape)} for a batch of {rows} "
                    "rows. Let it return numbers with a row for each row of the batch."
                )
        return tuple(Output(name, array.dtype.name, array.shape[1:]) for name, array in arrays.items())

    def _predicted(self, batch: Arrays) -> dict[str, np.ndarray[Any, Any]]:
        """Return the arrays that `predict` returns, by name.

        A function that squeezes would lose the row of a batch of one, and is given that row twice.
        """
        import numpy as np

        predict, state = self.module.predict, self.module.state
        arrays, rows = _named(predict(state, dict(batch))), len(next(iter(batch.values())))
        if rows != 1 or all(array.ndim and len(array) == 1 for array in arrays.values()):
            return arrays
        twice = _named(predict(state, {name: np.repeat(array, 2, axis=0) for name, array in batch.items()}))
        return {name: array[:1] if array.ndim and len(array) == 2 else array for name, array in twice.items()}

    @classmethod
    def check_device(cls, device: str) -> None:
        if device != "cpu":
            raise BadSetting(
                f"device={device!r}: a function predicts where it says itself. Leave the device out, and choose one in "
                "predict.",
                setting="device",
            )

    @classmethod
    def task_device(cls, device: str, gpus: Sequence[str]) -> str:
        return device


def _named(result: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays that `predict` returned, by name."""
    import numpy as np

    if isinstance(result, Mapping):
        return {str(name): np.asarray(value) for name, value in result.items()}
    if isinstance(result, tuple):
        return {f"output_{number}": np.asarray(value) for number, value in enumerate(result)}
    return {_ALONE: np.asarray(result)}
