"""A Keras model's weights as a safetensors file, written as a stream and read with NumPy (any process)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tritium.errors import MALFORMED, BadSetting, ModelError
from tritium.model.engine import Buffer, Weights
from tritium.model.safetensors import CODES, NAMES, entries, header

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_CHUNK = 64 << 20


@dataclass(frozen=True)
class Variables(Weights):
    """The variables of a model by their paths, in the model's order, which the file's metadata keep."""

    named: dict[str, Any]

    @classmethod
    def of(cls, model: Any) -> Variables:
        """Return the model's own variables, not copies. Raises BadSetting for a dtype that safetensors can't hold."""
        import keras

        named: dict[str, Any] = {}
        for variable in model.weights:
            dtype = keras.backend.standardize_dtype(variable.dtype)
            if dtype not in CODES:
                raise BadSetting(f"{variable.path!r} is a variable of {dtype}, which safetensors can't hold.")
            name, number = variable.path, 2
            while name in named:
                name, number = f"{variable.path}#{number}", number + 1
            named[name] = variable
        return cls(named)

    def stream(self) -> Iterator[memoryview]:
        """Yield the file in pieces; at most one array is copied at a time."""
        import keras
        import numpy as np

        facts = {name: (keras.backend.standardize_dtype(v.dtype), tuple(v.shape)) for name, v in self.named.items()}
        width = {name: dtype_of(dtype).itemsize for name, (dtype, _) in facts.items()}
        order = sorted(facts, key=lambda name: (-width[name], name))  # Wide first, to align all.
        sizes = ((n, CODES[facts[n][0]], facts[n][1], math.prod(facts[n][1]) * width[n]) for n in order)
        yield memoryview(header(sizes, {"format": "keras", "order": json.dumps(list(self.named))}))
        for name in order:
            array = np.ascontiguousarray(as_array(self.named[name])).astype(dtype_of(facts[name][0]), copy=False)
            data: Any = array.reshape(-1).view(np.uint8)
            for start in range(0, len(data), _CHUNK):
                yield memoryview(data[start : start + _CHUNK])


def dtype_of(name: str) -> np.dtype[Any]:
    """Return NumPy's dtype of this name; bfloat16 and the like are of ml_dtypes, which Keras brings along."""
    import numpy as np

    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes  # type: ignore[import-untyped, unused-ignore]

        dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return dtype


def as_array(variable: Any) -> Array:
    """Return a copy of a variable's value, or a view of it where it lies in host memory."""
    import keras

    array: Array = keras.ops.convert_to_numpy(variable)
    return array


def read(buffer: Buffer) -> dict[str, Array]:
    """Return the arrays by name, in the model's order, as views of `buffer`. Raises ModelError for any other file."""
    import numpy as np

    by_name, metadata = entries(buffer)
    arrays = {}
    try:
        order = {name: by_name[name] for name in json.loads(metadata.get("order", "null")) or sorted(by_name)}
    except MALFORMED as error:
        raise ModelError(f"The order of the weights is damaged: {error!r:.200}.") from error
    for name, entry in order.items():
        dtype, count = dtype_of(NAMES[entry.code]), math.prod(entry.shape)
        if count * dtype.itemsize != entry.end - entry.start:
            raise ModelError(f"The weights are cut short or damaged at {name!r}: not {count} numbers of {dtype}.")
        flat = np.frombuffer(buffer, dtype, count, entry.start) if count else np.empty(0, dtype)
        arrays[name] = flat.reshape(entry.shape)
    return arrays


def put(variables: Sequence[Any], arrays: Sequence[Array], names: Sequence[str] = ()) -> None:
    """Assign the arrays to the variables, one by one. Raises ModelError where their number or a shape differs."""
    if len(variables) != len(arrays):
        raise ModelError(f"There are weights for {len(arrays)} variables, and the model has {len(variables)}.")
    for number, (variable, array) in enumerate(zip(variables, arrays, strict=True)):
        if tuple(variable.shape) != tuple(array.shape):
            name = names[number] if names else number
            raise ModelError(
                f"The weights {name!r} are {list(array.shape)}, and the model's {variable.path!r} is "
                f"{list(variable.shape)}. Was the model changed since it was saved?"
            )
    for variable, array in zip(variables, arrays, strict=True):
        variable.assign(array)
