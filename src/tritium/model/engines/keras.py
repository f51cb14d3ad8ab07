"""`KerasEngine`: a Keras 3 model behind the interface `Engine` (any process)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

from tritium.errors import BadSetting, ModelError
from tritium.model import forms
from tritium.model.engine import Buffer, Engine, Maker, Parts
from tritium.model.engines.keras_form import Form, built, form_of, named_outputs, remember
from tritium.model.engines.keras_here import fresh_names, imported, set_random_seed
from tritium.model.engines.keras_weights import Variables, as_array, put, read
from tritium.model.forms import TEXT, WHOLE, list_of, mapping_of, optional
from tritium.model.signature import Output

if TYPE_CHECKING:
    import numpy as np

    from tritium.model.engine import Arrays

_DEVICE = re.compile(r"(cpu|gpu|cuda)(?::(\d+))?$")


def _is_row(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and TEXT.fits(value[0]) and list_of(WHOLE).fits(value[1])


def _is_config(value: Any) -> bool:
    try:
        return isinstance(json.loads(value), dict)
    except (TypeError, ValueError, RecursionError):
        return False


class KerasEngine(Engine):
    """The engine of a keras.Model. Its weights are a safetensors file, its configuration is a fact of the manifest.

    Only classes and functions that are not Keras's are saved as code: a model of Keras's own layers runs none when it
    is loaded. The back end on which it predicts is the one of the process; where Keras is not imported and
    KERAS_BACKEND not set, it is the one on which the model was saved.
    """

    name = "keras"
    framework = "keras"
    weights_file = "model.safetensors"
    code_file = "objects.pkl"
    module_class = "keras.Model"
    trusted = ("keras",)
    facts: ClassVar[Mapping[str, forms.Requirement]] = {
        "backend": optional(TEXT),
        "config": optional(forms.Requirement("a configuration as JSON", _is_config)),
        "inputs": optional(mapping_of(forms.Requirement("a dtype and a shape", _is_row))),
    }
    transformer = "tritium.ml.keras.model:KerasModel"

    def __init__(self, module: Any, device: str | None = None) -> None:
        """Wrap `module`. `device` is where it is called; None: Keras's default."""
        self.module = module
        self._device = device
        self._copies: dict[str, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_copies": {}}  # They may be on devices that the reader lacks.

    def save(self, *, by_value: bool) -> Parts:
        keras = imported()
        weights, facts = Variables.of(self.module), {"backend": keras.backend.backend()}
        if not by_value:
            return Parts(weights, None, facts)
        form = form_of(self.module)
        inputs = {name: [dtype, list(shape)] for name, (dtype, shape) in form.inputs.items()}
        return Parts(weights, form.code(), {**facts, "config": form.config, "inputs": inputs})

    @classmethod
    def restore(
        cls, weights: Buffer, facts: Mapping[str, Any], by: Maker | bytes, *, device: str | None = None
    ) -> KerasEngine:
        keras = imported(facts.get("backend"))
        if isinstance(by, Maker):
            module = _placed(lambda: _made(by), device)
        else:
            inputs = {name: (dtype, tuple(shape)) for name, (dtype, shape) in (facts.get("inputs") or {}).items()}
            form = Form.of_code(facts.get("config"), by, inputs)
            module = _placed(lambda: form.model(drawn=False), device)
            remember(module, form)
        arrays = read(weights)
        put(module.weights, list(arrays.values()), list(arrays))
        if keras.backend.backend() == "torch":
            module.eval()
        return cls(module, device)

    @classmethod
    def runs_code(cls, facts: Mapping[str, Any]) -> str:
        version = str(imported(facts.get("backend")).__version__)
        # CVE-2025-1550, -8747 and -49655 run code; -12058 reads a file or a URL.
        if [int(number) for number in re.findall(r"\d+", version)[:2]] >= [3, 12]:
            return ""
        return f"Keras {version}, which runs code or reads files that a configuration names, as 3.12 does not"

    @contextmanager
    def on(self, device: str | None) -> Iterator[KerasEngine]:
        """Yield the engine on `device`. One copy for each device but Keras's default is kept as long as this engine."""
        if device is None or _named(device) == _named(self._device or _default()):
            yield self
            return
        if _named(device) != "cpu:0" and not _gpus():
            raise BadSetting(f"device={device!r}: Keras sees no GPU here. Use device='cpu'.")
        if device not in self._copies:
            self._copies[device] = _placed(lambda: form_of(self.module).model(drawn=False), device)
        put(self._copies[device].weights, [as_array(variable) for variable in self.module.weights])
        yield KerasEngine(self._copies[device], device)

    def call(self, batch: Arrays, outputs: Sequence[str]) -> Arrays:
        """Call the model with one input by position, or several as a dict by name.

        It must return one array, or several in the order of `outputs`, or a dict. On JAX, which compiles a function for
        each number of rows, the batch is filled up to a power of two by its first row.
        """
        keras = imported()
        rows = len(next(iter(batch.values())))
        full = 1 << (rows - 1).bit_length() if keras.backend.backend() == "jax" else rows
        inputs = {name: _filled(array, full) for name, array in batch.items()}
        with _on(self._device):
            result = self.module.predict_on_batch(next(iter(inputs.values())) if len(inputs) == 1 else inputs)
        arrays = named_outputs(self.module, result)
        if not isinstance(result, Mapping) and len(arrays) == len(outputs):
            arrays = dict(zip(outputs, arrays.values(), strict=True))
        if missing := [name for name in outputs if name not in arrays]:
            raise ModelError(
                f"The model should return {list(outputs)}, and returned {list(arrays)}: {missing[0]!r} is missing."
            )
        return {name: _plain(arrays[name])[:rows] for name in outputs}

    def describe(self, batch: Arrays) -> tuple[Output, ...]:
        inputs = {name: _filled(array, len(array)) for name, array in batch.items()}
        with _on(self._device):
            result = self.module.predict_on_batch(next(iter(inputs.values())) if len(inputs) == 1 else inputs)
        arrays = {name: _plain(value) for name, value in named_outputs(self.module, result).items()}
        return tuple(Output(name, array.dtype.name, array.shape[1:]) for name, array in arrays.items())

    @classmethod
    def check_device(cls, device: str) -> None:
        _named(device)

    @classmethod
    def task_device(cls, device: str, gpus: Sequence[str]) -> str:
        name = _named(device)
        if name == "cpu:0":
            return "cpu"
        count, index = _gpus(), int(name.partition(":")[2])
        if ":" not in device and gpus:  # Where only the task's own GPUs are visible, they are numbered from 0.
            index = int(gpus[0]) if int(gpus[0]) < count else 0
        if index >= count:
            raise BadSetting(
                f"device={device!r}: Keras sees {count} GPU(s) on this executor. Use device='cpu', or executors with "
                "GPUs."
            )
        return f"cuda:{index}"


def _made(maker: Maker) -> Any:
    keras = imported()
    try:
        if maker.seed is not None:
            set_random_seed(maker.seed)
        with fresh_names():
            module = maker.make()
    except Exception as error:
        raise ModelError(
            f"The model is made by {maker.origin!r}, which raised {type(error).__name__}: {error}."
        ) from error
    if not isinstance(module, keras.Model):
        raise ModelError(f"{maker.origin!r} gave a {type(module).__name__}, no keras.Model.")
    return built(module, {})


def _filled(array: np.ndarray[Any, Any], rows: int) -> np.ndarray[Any, Any]:
    """Return the array with this many rows, writable: a model may write over its input, and torch warns otherwise."""
    import numpy as np

    missing = rows - len(array)
    if missing:
        return np.concatenate([array, np.repeat(array[:1], missing, axis=0)])
    return array if array.flags.writeable else array.copy()


def _plain(value: Any) -> np.ndarray[Any, Any]:
    import numpy as np

    array = np.asarray(value)
    return array.astype(np.float32) if array.dtype.kind == "V" or array.dtype.name in ("bfloat16", "float16") else array


def _named(device: str) -> str:
    """Return a device as Keras names it: "cpu:0", "gpu:1". Raises BadSetting for any other name."""
    match = _DEVICE.match(str(device))
    if match is None:
        raise BadSetting(f"device={device!r} is none of Keras's devices: 'cpu', 'cuda', 'cuda:1'.")
    return "cpu:0" if match[1] == "cpu" else f"gpu:{match[2] or 0}"


def _placed(make: Callable[[], Any], device: str | None) -> Any:
    """Return a new model on this device; None: on Keras's default.

    On torch it is moved there: within `keras.device` Keras 3.15 makes no layer that draws random numbers.
    """
    if imported().backend.backend() != "torch":
        with _on(device):
            return make()
    module = make()
    return module if device is None else module.to(_named(device).replace("gpu", "cuda"))


def _on(device: str | None) -> AbstractContextManager[Any]:
    keras = imported()
    scope: AbstractContextManager[Any] = nullcontext() if device is None else keras.device(_named(device))
    return scope


def _default() -> str:
    return "cuda:0" if _gpus() else "cpu"


def _gpus() -> int:
    """Return how many GPUs the back end of Keras sees."""
    keras = imported()
    if keras.backend.backend() == "torch":
        import torch

        return torch.cuda.device_count()
    return sum(name.startswith("gpu") for name in keras.distribution.list_devices())
