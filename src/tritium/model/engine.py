"""`Engine`: the interface by which a model of any framework is saved, restored and called (any process).

An engine holds one model of its framework. Nothing outside `tritium.model.engines` knows which framework that is: what
goes in and what comes out are NumPy arrays, files and JSON.
"""

from __future__ import annotations

import hashlib
import mmap
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import numpy as np

    Arrays = Mapping[str, np.ndarray[Any, Any]]

Buffer = mmap.mmap | bytearray


class Weights(ABC):
    """The weights of a model, as the file that they make. They are not copied: it is always the current ones."""

    @abstractmethod
    def stream(self) -> Iterator[memoryview]:
        """The file, piece by piece; the same weights always give the same pieces."""

    def digest(self) -> str:
        """The hash of the file, 32 hexadecimal digits."""
        checksum = hashlib.sha256()
        for piece in self.stream():
            checksum.update(piece)
        return checksum.hexdigest()[:32]

    def checksums(self) -> tuple[int, ...]:
        """A CRC-32 of each piece of the file: it tells whether a weight has changed, in a third of a digest's time.

        It reads what is there, because a framework's own counter misses writes that go around it (through torch's
        `.data`, or NumPy). One number that changed always gives another CRC; several do but for one case in 2³² for
        each piece.
        """
        return tuple(zlib.crc32(piece) for piece in self.stream())


@dataclass(frozen=True)
class Parts:
    """What a model is saved or sent as."""

    weights: Weights
    """The large part: one file, which processes of one machine map together."""
    code: bytes | None
    """The model without its weights, by value; None where `save` was not asked for it, b"" where there is none."""
    facts: Mapping[str, Any]
    """What `restore` needs beside the two: small, and JSON. A saved model keeps it in its manifest."""


@dataclass(frozen=True)
class Maker:
    """A function or class without arguments that makes a model, whose weights are then replaced."""

    origin: str
    """Its name, "package.module:name"."""
    make: Callable[[], Any]
    seed: int | None = None
    """What torch, NumPy and `random` are seeded with meanwhile; None: they are left alone."""


class Engine(ABC):
    """A model of one framework: saved, restored and called."""

    name: ClassVar[str]
    """How manifests name it: a key of `tritium.model.engines.registry`."""
    framework: ClassVar[str | None]
    """The module of `tritium.frameworks` that imports the framework and sets its threads; None: nothing to import."""
    weights_file: ClassVar[str]
    """What `Parts.weights` is called in the directory of a saved model."""
    code_file: ClassVar[str | None]
    """What `Parts.code` is called there. None: the weights are all there is, and loading them runs no code."""
    module_class: ClassVar[str]
    """The class of its models, "package.Class": what an origin must be, or return."""
    trusted: ClassVar[tuple[str, ...]]
    """The packages whose model classes are made without `trusted=`, as they come with the framework."""

    module: Any
    """The framework's own object. It can be replaced; each use takes the one that is there then."""

    @abstractmethod
    def __init__(self, module: Any) -> None: ...

    # ---- files

    @abstractmethod
    def save(self, *, by_value: bool) -> Parts:
        """The model as it is now. `by_value`: with its code, which need not be importable where it is restored.

        Raises BadSetting for weights that the file can't hold.
        """

    @classmethod
    @abstractmethod
    def restore(
        cls, weights: Buffer, facts: Mapping[str, Any], by: Maker | bytes, *, device: str | None = None
    ) -> Engine:
        """The model of these parts, made by a Maker or by `Parts.code`.

        Its weights are views of `weights` where the framework can do that. With `device` the model is for calls alone,
        there, and need not be brought `on` it. Raises ModelError when the weights do not fit what was made.
        """

    # ---- calls

    @abstractmethod
    def on(self, device: str | None) -> AbstractContextManager[Engine]:
        """An engine to `call` inside, with the current weights on this device, in the mode for predictions.

        None is the device where the model is. After it the model is as it was. Raises BadSetting for a device that is
        not there; another one is never used instead.
        """

    @abstractmethod
    def call(self, batch: Arrays, outputs: Sequence[str]) -> Arrays:
        """The outputs `[n, …]` by name for a batch of inputs `[n, …]` by name, in the dtypes that the model gives.

        What NumPy has no dtype for comes as float32. The model is called once: the caller cuts the rows into batches.
        The arrays of `batch` may be read-only: an engine copies them where its model could write over them. Raises
        ModelError when the model does not return `outputs`.
        """

    # ---- devices

    @classmethod
    @abstractmethod
    def check_device(cls, device: str) -> None:
        """BadSetting unless the framework knows devices of this name, which need not be on this machine."""

    @classmethod
    @abstractmethod
    def task_device(cls, device: str, gpus: Sequence[str]) -> str:
        """The device of a Spark task that was given the GPUs of these addresses; BadSetting when it is not there."""
