"""`Engine`: the interface by which a model of any framework is saved, restored and called (any process).

An engine holds one model of its framework. Only `tritium.model.engines` depends on the framework: the inputs and
outputs of an engine are NumPy arrays, files and JSON.
"""

from __future__ import annotations

import hashlib
import mmap
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from tritium.errors import BadSetting
from tritium.model.calls import Computing
from tritium.model.forms import Requirement
from tritium.model.signature import Output, Signature

if TYPE_CHECKING:
    import numpy as np

    Arrays = Mapping[str, np.ndarray[Any, Any]]

Buffer = mmap.mmap | bytearray


class Weights(ABC):
    """The weights of a model as a file. They are not copied: it is always of the current ones."""

    @abstractmethod
    def stream(self) -> Iterator[memoryview]:
        """Yield the file in pieces; the same weights always give the same pieces."""

    def digest(self) -> str:
        """Return the hash of the file, 32 hexadecimal digits."""
        checksum = hashlib.sha256()
        for piece in self.stream():
            checksum.update(piece)
        return checksum.hexdigest()[:32]

    def checksums(self) -> tuple[int, ...]:
        """Return a CRC-32 of each piece of the file, to detect changed weights in a third of a digest's time.

        It reads all weights, because a framework's own counter misses writes that bypass it (through torch's `.data`,
        or NumPy). One changed number always gives another CRC; several changed ones in a piece go unseen in one case
        of 2³².
        """
        return tuple(zlib.crc32(piece) for piece in self.stream())


@dataclass(frozen=True)
class Parts:
    """The parts as which a model is saved or sent."""

    weights: Weights
    """The large part: one file, whose memory the processes of one machine share."""
    code: bytes | None
    """The model without its weights, by value; None where `save` was not asked for it, b"" where there is none."""
    facts: Mapping[str, Any]
    """All else that `restore` needs, small and as JSON. A saved model has it in its manifest."""


@dataclass(frozen=True)
class Maker:
    """A function or class without arguments that makes a model, whose weights are then replaced."""

    origin: str
    """Its name, "package.module:name"."""
    make: Callable[[], Any]
    seed: int | None = None
    """The seed of torch, NumPy and `random` during the call; None: they are not seeded."""


class Callee(Protocol):
    """A model that can be called, in this process or elsewhere."""

    def call(self, batch: Arrays, outputs: Sequence[str]) -> Arrays:
        """Do as `Engine.call`."""


class Engine(ABC):
    """A model of one framework: saved, restored and called."""

    name: ClassVar[str]
    """The name in manifests: a key of `tritium.model.engines.registry`."""
    framework: ClassVar[str | None]
    """The framework in `tritium.frameworks` that is imported, and whose threads are set; None: nothing to import."""
    weights_file: ClassVar[str]
    """The file of `Parts.weights` in the directory of a saved model."""
    code_file: ClassVar[str | None]
    """The file of `Parts.code` there. None: the weights are the whole model, and loading them runs no code."""
    module_class: ClassVar[str]
    """The class of its models, "package.Class", which an origin must be or return."""
    trusted: ClassVar[tuple[str, ...]]
    """The packages whose model classes are made without `trusted=`, as they come with the framework."""

    facts: ClassVar[Mapping[str, Requirement]] = {}
    """The forms of `Parts.facts`."""

    transformer: ClassVar[str]
    """The Spark ML transformer of its models, "package.module:Class"."""

    takes_transform: ClassVar[bool] = False
    """Whether `call` applies `transform`."""

    explainer: ClassVar[str] = ""
    """What `contributions` is called as a setting of `tr.explain`; "": there is none of the framework's own."""

    computes: Computing = Computing()
    """How `call` computes. It may be set, to what `check_computing` allows."""

    module: Any
    """The framework's own object. It can be replaced; each use takes the current one."""
    transform: Callable[..., Any] | None = None
    """The user's function (inputs) -> inputs, applied before the model is called; None: there is none."""

    @abstractmethod
    def __init__(self, module: Any) -> None: ...

    # ---- files

    @abstractmethod
    def save(self, *, by_value: bool) -> Parts:
        """Return the parts of the model as it is now. `by_value`: with its code, so that it need not be importable.

        Raises BadSetting for weights that the file can't hold.
        """

    @classmethod
    @abstractmethod
    def restore(
        cls, weights: Buffer, facts: Mapping[str, Any], by: Maker | bytes, *, device: str | None = None
    ) -> Engine:
        """Return an engine with the model of these parts, made by a Maker or by `Parts.code`.

        Its weights are views of `weights` where the framework can do that. With `device` the model is on that device,
        for calls alone, and needs no `on`. Raises ModelError when the weights do not fit the model.
        """

    @classmethod
    def runs_code(cls, facts: Mapping[str, Any]) -> str:
        """Return why `restore` may run code that these facts name, where no code is given to it; "" where it can't."""
        return ""

    # ---- calls

    @abstractmethod
    def on(self, device: str | None) -> AbstractContextManager[Engine]:
        """Yield an engine to `call`, with the current weights on this device, in the mode for predictions.

        None is the device where the model is. The block leaves the model unchanged. Raises BadSetting for a device that
        does not exist; another one is never used instead.
        """

    @abstractmethod
    def call(self, batch: Arrays, outputs: Sequence[str]) -> Arrays:
        """Return the outputs `[n, …]` by name for a batch of inputs `[n, …]` by name, in the model's dtypes.

        Dtypes that NumPy lacks become float32. The model is called once: the caller splits the rows into batches.
        The arrays of `batch` may be read-only: an engine copies them where its model could write over them. Raises
        ModelError when the model does not return `outputs`.
        """

    def describe(self, batch: Arrays) -> tuple[Output, ...]:
        """Return the outputs that the model has for a batch of inputs `[n, …]` by name. Raises BadData, BadSetting."""
        raise BadSetting(f"A model of {self.name} needs a signature: tr.Model(module, signature).", setting="signature")

    def declared(self) -> Signature | None:
        """Return the signature that the model's own file declares, without a task; None where it declares none."""
        return None

    def contributions(
        self, batch: Arrays, outputs: Sequence[str], *, background: Arrays, samples: int | None, seed: int
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return SHAP values, float64 `[n, features, k]`, and their bases, `[n, k]`, for a batch of inputs.

        background : rows of which a feature takes its values when it is left out. samples : as `tr.explain` has it.
        """
        raise NotImplementedError

    @classmethod
    def check_computing(cls, computes: Computing) -> None:
        """Raise BadSetting where models of this engine can't compute so."""
        if computes != Computing():
            raise BadSetting(f"precision and compile are for models of torch, and this one is of {cls.name}.")

    # ---- devices

    def use_threads(self, threads: int) -> None:  # noqa: B027 - most have the threads of their process
        """Let calls use so many threads, where they are not those that `Framework.threads` sets for the process."""

    @classmethod
    @abstractmethod
    def check_device(cls, device: str) -> None:
        """Raise BadSetting unless the framework knows devices of this name, which need not be on this machine."""

    @classmethod
    @abstractmethod
    def task_device(cls, device: str, gpus: Sequence[str]) -> str:
        """Return the device of a Spark task with the GPUs of these addresses. Raises BadSetting if it is missing."""
