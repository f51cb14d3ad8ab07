"""A model as it goes to the executors to be explained, and what is computed of it there (any process)."""

from __future__ import annotations

import contextlib
import copy
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from tritium import frameworks
from tritium.errors import WrongVersion
from tritium.model.calls import CallState
from tritium.model.engine import Engine
from tritium.model.engines import registry
from tritium.model.model import Model
from tritium.model.score import Scorer
from tritium.model.signature import Input, Signature, names_of_numbers

Numbers = np.ndarray[Any, Any]
Arrays = Mapping[str, Numbers]


@dataclass
class Explained:
    """A model in parts, from which each process restores it once."""

    engine_name: str
    weights: Numbers
    """Their bytes, uint8 `[n]`: an array, so that the processes of an executor map one file of them."""
    code: bytes
    facts: dict[str, Any]
    transform: Callable[..., Any] | None
    signature: Signature
    batch_size: int

    @classmethod
    def of(cls, model: Model, batch_size: int) -> Explained:
        """Return the model as it is now."""
        parts = model.engine.save(by_value=True)
        weights = np.frombuffer(b"".join(bytes(piece) for piece in parts.weights.stream()), np.uint8)
        facts, transform = dict(parts.facts), model.input_transform
        return cls(model.engine.name, weights, parts.code or b"", facts, transform, model.signature, batch_size)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("engine", "explainer")}

    @cached_property
    def engine(self) -> Engine:
        """The restored engine, on the CPU."""
        kind = registry.find(self.engine_name)
        if (framework := self._framework) is not None:
            framework.load()
        engine = copy.copy(kind.restore(bytearray(self.weights), self.facts, self.code, device="cpu"))
        engine.transform = self.transform
        return engine

    @cached_property
    def _framework(self) -> Any:
        framework = frameworks.find(registry.find(self.engine_name).framework)
        return None if framework is None else framework.predicting(self.facts)

    def threads(self) -> contextlib.AbstractContextManager[None]:
        """Give the framework the cores of the Spark task, in this block."""
        from pyspark import TaskContext

        task = TaskContext.get()
        if task is None:
            return contextlib.nullcontext()
        self.engine.use_threads(task.cpus() or 1)
        if self._framework is None:
            return contextlib.nullcontext()
        threads: contextlib.AbstractContextManager[None] = self._framework.threads(task.cpus() or 1)
        return threads

    def predicted(self, inputs: Arrays) -> Numbers:
        """Return the number that is explained, `[n]` or `[n, k]`: the prediction, or the probabilities of classes."""
        columns, _ = Scorer(self.engine, self.signature, CallState(self.batch_size)).score(inputs)
        return columns["probability" if self.signature.task == "classification" else "prediction"]

    def flat(self, inputs: Arrays) -> Numbers:
        """Return the inputs side by side, float64 `[n, features]`."""
        parts = [inputs[i.name].reshape(len(inputs[i.name]), -1) for i in self.signature.inputs]
        return np.concatenate(parts, axis=1).astype(np.float64)

    def unflat(self, rows: Numbers, like: Arrays) -> Arrays:
        """Return `[n, features]` as inputs with the dtypes and shapes of those in `like`."""
        inputs, start = {}, 0
        for taken in self.signature.inputs:
            shape, dtype = like[taken.name].shape[1:], like[taken.name].dtype
            width = math.prod(shape)
            part = rows[:, start : start + width]
            inputs[taken.name] = (np.rint(part) if dtype.kind in "iu" else part).astype(dtype).reshape(-1, *shape)
            start += width
        return inputs


@dataclass
class Shap(Explained):
    """The contributions of features to a prediction."""

    kind: str = "tree"
    background: Arrays | None = None
    """Rows that stand for the data, of which a feature takes its values when it is left out."""
    samples: int | None = None
    seed: int = 0

    def __call__(self, batch: Arrays) -> dict[str, Numbers]:
        """Return contributions, float64 `[n, features]` or `[n, features, k]`, and bases, `[n]` or `[n, k]`."""
        with self.threads():
            values, base = self._kernel(batch) if self.kind == "kernel" else self._by_engine(batch)
        if values.shape[2] == 1:
            values, base = values[:, :, 0], base[:, 0]
        return {"shap": values, "base": base}

    def _by_engine(self, batch: Arrays) -> tuple[Numbers, Numbers]:
        outputs = [output.name for output in self.signature.outputs]
        background = self.background or {}
        return self.engine.contributions(batch, outputs, background=background, samples=self.samples, seed=self.seed)

    @cached_property
    def explainer(self) -> Any:
        """The explainer of the package `shap`."""
        try:
            import shap  # type: ignore[import-untyped]
        except ModuleNotFoundError as error:
            raise WrongVersion(
                "SHAP values of this model need the package shap, on the executors as well: "
                "pip install 'tritium[explain]'.",
                library="shap",
            ) from error
        like = self.background or {}

        def called(rows: Numbers) -> Numbers:
            predicted = self.predicted(self.unflat(rows, like))
            two = self.signature.task == "classification" and predicted.shape[1] == 2
            return predicted[:, 1:] if two else predicted.reshape(len(predicted), -1)

        return shap.KernelExplainer(called, self.flat(like))

    def _kernel(self, batch: Arrays) -> tuple[Numbers, Numbers]:
        rows = self.flat(batch)
        state = np.random.get_state()  # Shap draws from NumPy's own numbers.
        np.random.seed(self.seed)
        try:
            values = self.explainer.shap_values(rows, nsamples=self.samples or "auto", silent=True)
        finally:
            np.random.set_state(state)
        base = np.asarray(self.explainer.expected_value, np.float64).reshape(-1)
        return np.asarray(values, np.float64).reshape(*rows.shape, -1), np.broadcast_to(base, (len(rows), len(base)))


@dataclass
class Permuted(Explained):
    """The predictions of a model for rows whose features are permuted, one after another."""

    repeats: int = 5
    seed: int = 0

    def features(self) -> Iterator[tuple[str, str, int | None]]:
        """Yield (name, input, index of a number in it); None: the input as a whole."""
        for taken in self.signature.inputs:
            names = numbers_of(taken)
            if names is None:
                yield taken.columns[0], taken.name, None
            else:
                yield from ((name, taken.name, index) for index, name in enumerate(names))

    def __call__(self, batch: Arrays) -> dict[str, Numbers]:
        """Return predictions `[n, 1 + features x repeats]`, or those of classes: of the rows, and of permuted ones.

        Rows are permuted within the batch, by the seed and the rows' content.
        """
        rows, content = len(next(iter(batch.values()))), 0
        for name in sorted(batch):
            content = zlib.crc32(np.ascontiguousarray(batch[name]).data, content)
        random = np.random.default_rng([self.seed, content])
        with self.threads():
            predictions = [self.predicted(batch)]
            for _, name, index in self.features():
                for _ in range(self.repeats):
                    order = random.permutation(rows)
                    values = batch[name][order]
                    if index is not None:
                        values = np.array(batch[name])
                        flat = values.reshape(rows, -1)
                        flat[:, index] = flat[order, index]
                    predictions.append(self.predicted({**batch, name: values}))
        return {"predictions": np.stack(predictions, axis=1)}


def numbers_of(taken: Input) -> Sequence[str] | None:
    """Return the names of the numbers in a row of an input; None where they are no features of their own."""
    if len(taken.columns) == 1 and (len(taken.shape) > 1 or None in taken.shape or taken.codec.get("pad")):
        return None
    return names_of_numbers(taken.columns, math.prod(n or 0 for n in taken.shape), taken.codec.get("slots", ()))
