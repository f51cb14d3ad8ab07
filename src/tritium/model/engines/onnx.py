"""`ONNXEngine`: a model in an ONNX file, called by ONNX Runtime, behind the interface `Engine` (any process)."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tritium.errors import BadData, BadSetting, ModelError, WrongVersion
from tritium.model.engine import Buffer, Engine, Maker, Parts, Weights
from tritium.model.signature import Input, Output, Signature

if TYPE_CHECKING:
    from tritium.model.engine import Arrays

_DTYPES = {"float": "float32", "double": "float64"}
_NUMBERS = ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "bool")


@dataclass(frozen=True)
class ONNXFile(Weights):
    """The content of an ONNX file, and its sessions in this process, one for each device."""

    content: bytes
    sessions: dict[tuple[str, int], Any] = field(default_factory=dict, repr=False, compare=False)

    def stream(self) -> Iterator[memoryview]:
        """Yield the file."""
        yield memoryview(self.content)

    def __reduce__(self) -> tuple[type[ONNXFile], tuple[bytes]]:
        return ONNXFile, (self.content,)  # A session can't be pickled.

    def session(self, device: str, threads: int) -> Any:
        """Return the onnxruntime.InferenceSession on this device. `threads`: of a call; 0: as many as there are cores.

        Raises ModelError for a file that ONNX Runtime can't read.
        """
        key = (device, threads)
        if key not in self.sessions:
            runtime = _runtime()
            options = runtime.SessionOptions()
            options.intra_op_num_threads = threads
            options.log_severity_level = 3  # Its warnings are about the graph's optimization.
            try:
                self.sessions[key] = runtime.InferenceSession(self.content, options, providers=_providers(device))
            except Exception as error:
                raise ModelError(
                    f"ONNX Runtime {runtime.__version__} can't read the model: {error}. Weights in files of their own "
                    "are not read: export the model as one file."
                ) from error
        return self.sessions[key]


class ONNXEngine(Engine):
    """The engine of an ONNX file, which is kept as it is; loading it runs no code."""

    name = "onnx"
    framework = None
    weights_file = "model.onnx"
    code_file = None
    module_class = "tritium.model.engines.onnx.ONNXFile"
    trusted = ()
    transformer = "tritium.ml.onnx.model:ONNXModel"

    module: ONNXFile

    def __init__(self, module: ONNXFile | str | os.PathLike[str], device: str = "cpu", threads: int = 0) -> None:
        """Wrap an ONNX file, or the one at this path. `threads`: of a call; 0: as many as there are cores."""
        self.module = module if isinstance(module, ONNXFile) else _read(module)
        self._device, self._threads = device, threads

    def save(self, *, by_value: bool) -> Parts:
        return Parts(self.module, b"" if by_value else None, {})

    @classmethod
    def restore(
        cls, weights: Buffer, facts: Mapping[str, Any], by: Maker | bytes, *, device: str | None = None
    ) -> ONNXEngine:
        engine = cls(ONNXFile(bytes(weights)), device or "cpu")
        if device is None:
            engine._session()  # A file that is damaged is refused when it is loaded.
        return engine

    def use_threads(self, threads: int) -> None:
        self._threads = threads

    @contextmanager
    def on(self, device: str | None) -> Iterator[ONNXEngine]:
        if device is not None:
            _providers(device)
        yield ONNXEngine(self.module, device or self._device, self._threads)

    def call(self, batch: Arrays, outputs: Sequence[str]) -> Arrays:
        session = self._session()
        known = [output.name for output in session.get_outputs()]
        if missing := [name for name in outputs if name not in known]:
            raise ModelError(f"The ONNX model has the outputs {known}, and the signature names {missing}.")
        return dict(zip(outputs, session.run(list(outputs), self._feeds(session, batch)), strict=True))

    def describe(self, batch: Arrays) -> tuple[Output, ...]:
        session = self._session()
        outputs = _numeric(session.get_outputs(), "returns")
        arrays = session.run([output.name for output in outputs], self._feeds(session, batch))
        return tuple(
            Output(output.name, array.dtype.name, array.shape[1:])
            for output, array in zip(outputs, arrays, strict=True)
        )

    def declared(self) -> Signature:
        """Return the signature that the file declares: a column for each input, of its name.

        Raises BadSetting for inputs or outputs that are no tensors of numbers with a row for each row of a batch.
        """
        session = self._session()
        taken = [
            Input(one.name, (one.name,), _dtype(one), _row(one)) for one in _numeric(session.get_inputs(), "takes")
        ]
        returned = [Output(one.name, _dtype(one), _row(one)) for one in _numeric(session.get_outputs(), "returns")]
        return Signature(tuple(taken), tuple(returned))

    def _session(self) -> Any:
        return self.module.session(self._device, self._threads)

    def _feeds(self, session: Any, batch: Arrays) -> dict[str, np.ndarray[Any, Any]]:
        """Return the inputs as the session takes them: one by its place, several by their names."""
        wanted = _numeric(session.get_inputs(), "takes")
        names = [one.name for one in wanted]
        arrays = list(batch.values()) if len(batch) == len(wanted) == 1 else [batch.get(name) for name in names]
        if any(array is None for array in arrays):
            raise BadData(f"The ONNX model takes the inputs {names}, and was given {list(batch)}.")
        return {one.name: np.ascontiguousarray(array, _dtype(one)) for one, array in zip(wanted, arrays, strict=True)}

    @classmethod
    def check_device(cls, device: str) -> None:
        if device.partition(":")[0] not in ("cpu", "cuda"):
            raise BadSetting(f"device={device!r}: ONNX Runtime is called on 'cpu' or 'cuda' here.", setting="device")

    @classmethod
    def task_device(cls, device: str, gpus: Sequence[str]) -> str:
        cls.check_device(device)
        return f"cuda:{gpus[0]}" if device == "cuda" and gpus else device


def _runtime() -> Any:
    try:
        import onnxruntime
    except ModuleNotFoundError as error:
        raise WrongVersion(
            f"The model is an ONNX file, and {sys.executable} does not have onnxruntime: pip install 'tritium[onnx]'.",
            library="onnxruntime",
        ) from error
    return onnxruntime


def _read(path: str | os.PathLike[str]) -> ONNXFile:
    try:
        return ONNXFile(Path(path).read_bytes())
    except OSError as error:
        raise ModelError(f"The ONNX file {os.fspath(path)!r} can't be read: {error}.", path=os.fspath(path)) from error


def _providers(device: str) -> list[Any]:
    """Return the execution providers of a device. Raises BadSetting where there is none; the CPU is never used instead.

    Operators that CUDA's lacks run on the CPU, as everywhere with ONNX Runtime.
    """
    ONNXEngine.check_device(device)
    kind, _, index = device.partition(":")
    if kind == "cpu":
        return ["CPUExecutionProvider"]
    if "CUDAExecutionProvider" not in _runtime().get_available_providers():
        raise BadSetting(
            f"device={device!r}: this ONNX Runtime has no CUDA (pip install onnxruntime-gpu). Use device='cpu'.",
            setting="device",
        )
    return [("CUDAExecutionProvider", {"device_id": int(index or 0)}), "CPUExecutionProvider"]


def _dtype(one: Any) -> str:
    name = str(one.type).removeprefix("tensor(").removesuffix(")")
    return _DTYPES.get(name, name)


def _row(one: Any) -> tuple[int | None, ...]:
    return tuple(length if isinstance(length, int) else None for length in one.shape[1:])


def _numeric(several: Sequence[Any], verb: str) -> Sequence[Any]:
    """Return these inputs or outputs. Raises BadSetting for one that is no batch of numbers."""
    for one in several:
        if _dtype(one) not in _NUMBERS:
            raise BadSetting(
                f"The ONNX model {verb} {one.name!r} as {one.type}, and columns are made of tensors of numbers. Export "
                "it without (of scikit-learn by skl2onnx: without maps, and with labels that are numbers), or name "
                "the outputs to take in a signature: tr.Model(path, signature)."
            )
        if not one.shape or isinstance(one.shape[0], int):
            raise BadSetting(
                f"The ONNX model {verb} {one.name!r} of the shape {one.shape}, whose first length is no batch of any "
                "size. Export it with a dynamic first dimension (torch.onnx.export: dynamic_axes, or dynamic_shapes)."
            )
    return several
