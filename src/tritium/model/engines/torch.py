"""`TorchEngine`: a torch module behind the interface `Engine` (any process)."""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

from tritium.errors import BadSetting, ModelError
from tritium.model.calls import Computing
from tritium.model.engine import Buffer, Engine, Maker, Parts
from tritium.model.engines.torch_copies import Copies
from tritium.model.engines.torch_defaults import torch_defaults
from tritium.model.engines.torch_module import frozen, pickled, rebuild, trainable, unpickled
from tritium.model.engines.torch_transform import InputTransform
from tritium.model.engines.torch_weights import Tensors, read
from tritium.model.forms import BOOL, Requirement, mapping_of
from tritium.model.signature import Output

if TYPE_CHECKING:
    import numpy as np
    import torch

    from tritium.model.engine import Arrays


class TorchEngine(Engine):
    """The engine of a torch.nn.Module. Its weights are a safetensors file, its code by value is a pickle."""

    name = "torch"
    framework = "torch"
    weights_file = "model.safetensors"
    code_file = "module.pkl"
    module_class = "torch.nn.Module"
    trusted = ("torch.nn",)
    facts: ClassVar[Mapping[str, Requirement]] = {"trainable": mapping_of(BOOL)}
    transformer = "tritium.ml.torch.model:TorchModel"
    takes_transform = True
    explainer = "gradient"

    module: torch.nn.Module

    def __init__(self, module: torch.nn.Module, device: torch.device | None = None) -> None:
        """Wrap `module`. `device` is where the inputs go; None: where the module's weights are."""
        self.module = module
        self._device = device
        self._copies = Copies()
        self._compiled: dict[str, tuple[torch.nn.Module, Any]] = {}
        """Device → the module that was compiled for it, and its compiled call."""

    def save(self, *, by_value: bool) -> Parts:
        tensors = Tensors.of(self.module)
        code = pickled(self.module, tensors.named) if by_value else None
        return Parts(tensors, code, {"trainable": trainable(tensors.named)})

    @classmethod
    @torch_defaults()
    def restore(
        cls, weights: Buffer, facts: Mapping[str, Any], by: Maker | bytes, *, device: str | None = None
    ) -> TorchEngine:
        import torch

        tensors = read(weights)
        module = rebuild(by, tensors) if isinstance(by, Maker) else unpickled(by, tensors, facts["trainable"])
        module.eval()
        if device is None:
            return cls(module)
        return cls(frozen(module).to(device), torch.device(device))

    @contextmanager
    def on(self, device: str | None) -> Iterator[TorchEngine]:
        """Yield the engine on `device`. One copy for each device but the module's is kept as long as this engine."""
        home = self._home()
        where = home if device is None else _present(device)
        module = self.module if where == home else self._copies.on(where, self.module)
        with _evaluating(module):
            ready = TorchEngine(module, where)
            ready.transform, ready.computes, ready._compiled = self.transform, self.computes, self._compiled
            yield ready

    def call(self, batch: Arrays, outputs: Sequence[str]) -> Arrays:
        """Call the module with one input by position, or several by keyword.

        It must return one tensor, or several in the order of `outputs`, or a dict.
        """
        import torch

        with torch.inference_mode():
            result = self._result(batch)
            if isinstance(result, torch.Tensor):
                result = (result,)
            tensors = dict(result) if isinstance(result, Mapping) else dict(zip(outputs, result, strict=False))
            missing = [name for name in outputs if not isinstance(tensors.get(name), torch.Tensor)]
            if missing or (not isinstance(result, Mapping) and len(result) != len(outputs)):
                returned = sorted(map(str, result)) if isinstance(result, Mapping) else f"{len(result)} value(s)"
                raise ModelError(f"The module should return the tensors {list(outputs)}, and returned {returned}.")
            return {name: _array(tensors[name]) for name in outputs}

    def contributions(
        self, batch: Arrays, outputs: Sequence[str], *, background: Arrays, samples: int | None, seed: int
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return expected gradients of the module's output, by the package shap: an estimate."""
        import numpy as np
        import shap  # type: ignore[import-untyped]
        import torch

        def tensors(arrays: Arrays) -> list[torch.Tensor]:
            return [torch.tensor(array) for array in arrays.values()]

        with torch.enable_grad():
            explainer = shap.GradientExplainer(self.module, tensors(background))
            values = explainer.shap_values(tensors(batch), nsamples=samples or 200, rseed=seed)
        base = self.call(background, outputs)[outputs[0]]
        base = base.reshape(len(base), -1).astype(np.float64).mean(axis=0)
        rows = len(next(iter(batch.values())))
        parts = [np.asarray(part, np.float64) for part in (values if isinstance(values, list) else [values])]
        flat = np.concatenate([part.reshape(rows, -1, len(base)) for part in parts], axis=1)
        return flat, np.broadcast_to(base, (rows, len(base)))

    def describe(self, batch: Arrays) -> tuple[Output, ...]:
        import torch

        from tritium.model.engines.torch_outputs import outputs_of

        with self.on(None) as ready, torch.inference_mode():
            return outputs_of(ready._result(batch))

    @classmethod
    def check_computing(cls, computes: Computing) -> None:
        """Allow all: what torch can't compile, it says when the module is called."""

    def _result(self, batch: Arrays) -> Any:
        """Apply the transform to these inputs, and call the module."""
        import torch

        device = self._home()
        # They are copied on the CPU, too: a module may write over its input, and Arrow's memory is read-only.
        inputs = {name: torch.tensor(array, device=device) for name, array in batch.items()}
        if self.transform is not None:
            inputs = InputTransform(self.transform)(inputs, training=False, module=self.module)
        dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[self.computes.precision]
        with nullcontext() if dtype is None else torch.autocast(device.type, dtype):
            call = self._compiled_call(device) if self.computes.compile else self.module
            return call(*inputs.values()) if len(inputs) == 1 else call(**inputs)

    def _compiled_call(self, device: torch.device) -> Any:
        """Return the module's call, compiled once for a device, and again for another module."""
        import torch

        module, call = self._compiled.get(str(device), (None, None))
        if module is not self.module:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # Torch's compiler imports torch.jit, which warns.
                call = torch.compile(self.module)
            self._compiled[str(device)] = self.module, call
        return call

    def _home(self) -> torch.device:
        """Return the device that was given, else that of the module's first weight."""
        import torch

        if self._device is not None:
            return self._device
        weight = next(itertools.chain(self.module.parameters(), self.module.buffers()), None)
        return torch.device("cpu") if weight is None else weight.device

    @classmethod
    def check_device(cls, device: str) -> None:
        _known(device)

    @classmethod
    def task_device(cls, device: str, gpus: Sequence[str]) -> str:
        import torch

        asked = torch.device(device)
        if asked.type != "cuda":
            return device
        count = torch.cuda.device_count()
        index = asked.index
        if index is None and gpus:  # Where only the task's own GPUs are visible, they are numbered from 0.
            index = int(gpus[0]) if int(gpus[0]) < count else 0
        if (index or 0) >= count:
            raise BadSetting(
                f"device={device!r}: torch sees {count} GPU(s) on this executor. Use device='cpu', or executors with "
                "GPUs."
            )
        return "cuda" if index is None else f"cuda:{index}"


def _array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    import torch

    tensor = tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
    array: np.ndarray[Any, Any] = tensor.cpu().numpy()
    return array


@contextmanager
def _evaluating(module: torch.nn.Module) -> Iterator[None]:
    """Set eval mode for the block, and restore every layer's mode after it.

    Several threads may be inside with modules that share layers: the last one to leave restores a layer's mode, as the
    others still compute with it.
    """
    layers = [layer for layer in module.modules() if hasattr(layer, "training")]  # A frozen TorchScript has none.
    with _lock:
        for layer in layers:
            users, training = _evaluated.get(id(layer), (0, layer.training))
            _evaluated[id(layer)] = (users + 1, training)
    try:
        module.eval()
        yield
    finally:
        with _lock:
            for layer in layers:
                users, training = _evaluated.pop(id(layer))
                if users > 1:
                    _evaluated[id(layer)] = (users - 1, training)
                else:
                    layer.training = training


_lock = threading.Lock()
_evaluated: dict[int, tuple[int, bool]] = {}
"""The id of a layer that is in use → its number of users, and its mode before them."""


def _present(device: str) -> torch.device:
    """Return a device of this machine. Raises BadSetting for a missing GPU; the CPU is never used instead."""
    import torch

    wanted = _known(device)
    if wanted.type == "cuda" and (wanted.index or 0) >= torch.cuda.device_count():
        raise BadSetting(f"device={device!r}: torch sees {torch.cuda.device_count()} GPU(s) here. Use device='cpu'.")
    return wanted


def _known(device: str) -> torch.device:
    import torch

    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise BadSetting(f"device={device!r} is no torch device: {error}") from error
