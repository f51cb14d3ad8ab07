"""Keras 3: `model.fit` trains data-parallel on its torch, JAX and TensorFlow back ends (rank)."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from tritium.errors import WrongVersion
from tritium.frameworks.framework import Framework, Place
from tritium.frameworks.jax import JAX
from tritium.frameworks.keras_fit import KerasRanks, connect_training
from tritium.frameworks.tensorflow import TensorFlow
from tritium.frameworks.torch import threads as torch_threads
from tritium.hints import did_you_mean
from tritium.model.engines.keras_here import VARIABLE

if TYPE_CHECKING:
    from tritium.observe.trace import Trace

BACKENDS = {
    "torch": "tritium.frameworks.keras_torch",
    "jax": "tritium.frameworks.keras_jax",
    "tensorflow": "tritium.frameworks.keras_tensorflow",
}
"""Back end → the module that connects its ranks."""

_ALONE: dict[str, Framework] = {"jax": JAX(), "tensorflow": TensorFlow()}
"""The frameworks that choose the devices of a single rank, too."""


@dataclass(frozen=True, kw_only=True)
class Keras(Framework):
    """Keras 3: `model.compile(…)` and `model.fit(…)` train one model on the rows of all ranks.

    Gradients are averaged over the ranks before each update. Training begins with rank 0's weights and optimizer
    state, and callbacks see logs that are averaged over the ranks.
    """

    backend: str | None = None
    """"torch", "jax" or "tensorflow". None: that of KERAS_BACKEND in the rank's environment, or else of Keras's
    configuration there."""

    name = "keras"
    modules = ("keras",)
    covers = tuple(BACKENDS)
    install = "keras"
    float32 = True
    secondary = re.compile(
        r"gloo|connectFullMesh|remote process exit|Dist(Network|Store)Error|nccl(Remote|System|Internal)Error|"
        r"(UnavailableError|AbortedError|CancelledError|InternalError): .*(ollective|onnection|ocket|RPC)|"
        r"another rank ended while they averaged|"
        r"(Xla|Jax)RuntimeError: .*(UNAVAILABLE|ABORTED|CANCELLED|onnection|oordination)",
        re.IGNORECASE | re.DOTALL,
    )

    def wrong(self, ranks: int) -> Iterator[str]:
        """Yield each error of the back end as a sentence."""
        if self.backend is not None and self.backend not in BACKENDS:
            hint = did_you_mean(str(self.backend), BACKENDS)
            yield f"backend={self.backend!r} is no back end of Keras: {', '.join(map(repr, BACKENDS))}.{hint}"

    def prepare(self, *, gpus: bool) -> None:
        """Choose the back end, and the CPU for torch where the rank has no GPU: Keras reads both when it is imported.

        By itself Keras takes any GPU that it sees, also that of another task.
        """
        if self.backend is not None:
            os.environ[VARIABLE] = self.backend
        if not gpus:
            os.environ.setdefault("KERAS_TORCH_DEVICE", "cpu")
        TensorFlow().prepare(gpus=gpus)

    def load(self) -> None:
        """Import Keras and its back end. Raises ImportError where Keras is missing, WrongVersion where the back end
        is."""
        if self.backend is not None:
            os.environ[VARIABLE] = self.backend
        try:
            importlib.import_module("keras")
        except ImportError as error:
            if find_spec("keras") is None:
                raise
            chosen = os.environ.get(VARIABLE) or "its configured back end"
            raise WrongVersion(
                f"Keras can't be imported on {chosen} by {sys.executable}: {error}. Install that back end there: "
                f"{sys.executable} -m pip install {os.environ.get(VARIABLE, 'torch')}; or choose another one: "
                f"framework=tr.Keras(backend=…) with one of {', '.join(map(repr, BACKENDS))}.",
                framework=self.name,
            ) from error

    def run(self, place: Place, function: Callable[[], Any]) -> Any:
        """Call the function with the ranks connected by the back end's own collectives."""
        keras: Any = sys.modules["keras"]
        chosen = keras.backend.backend()
        if place.size == 1:
            return _ALONE[chosen].run(place, function) if chosen in _ALONE else function()
        if chosen not in BACKENDS:
            raise WrongVersion(
                f"Keras runs on its {chosen!r} back end here, which can't train on several ranks. Choose one that can: "
                f"framework=tr.Keras(backend=…) with one of {', '.join(map(repr, BACKENDS))}.",
                framework=self.name,
            )

        def call(ranks: KerasRanks) -> Any:
            connect_training(keras, place, ranks)
            return function()

        return importlib.import_module(BACKENDS[chosen]).run(place, call)

    def on_returned(self) -> None:
        """Do as the framework of the back end does."""
        backend = sys.modules["keras"].backend.backend()
        if backend in _ALONE:
            _ALONE[backend].on_returned()

    def predicting(self, facts: Mapping[str, Any]) -> Keras:
        """Return Keras on the back end of the training, unless this process has imported or chosen one."""
        chosen = "keras" in sys.modules or VARIABLE in os.environ
        return self if chosen else Keras(backend=facts.get("backend"))

    def threads(self, cpus: int | None) -> AbstractContextManager[None]:
        """Return a context in which torch uses `cpus` threads, where it is the back end; the others choose at start."""
        on_torch = "keras" in sys.modules and sys.modules["keras"].backend.backend() == "torch"
        return torch_threads(cpus) if on_torch else nullcontext()

    def trace(self, trace: Trace) -> None:
        """Measure the parts of a step on torch; on JAX and TensorFlow a step is one computation."""
        keras: Any = sys.modules["keras"]
        if keras.backend.backend() != "torch":
            return
        from tritium.frameworks.torch_trace import hook, within

        hook(trace)
        for optimizer in (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer):
            optimizer.apply = within(trace, "optimizer", optimizer.apply)
