"""`LightGBMEngine`: a LightGBM booster behind the interface `Engine` (any process)."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tritium.errors import BadSetting, ModelError, WrongVersion
from tritium.model.engine import Buffer, Engine, Maker, Parts, Weights

if TYPE_CHECKING:
    import lightgbm

    from tritium.model.engine import Arrays

_CPU = "LightGBM predicts on the CPU: device='cpu'."


@dataclass(frozen=True)
class Text(Weights):
    """A booster as LightGBM's own text."""

    content: bytes

    def stream(self) -> Iterator[memoryview]:
        """Yield the text, UTF-8."""
        yield memoryview(self.content)


class LightGBMEngine(Engine):
    """The engine of a lightgbm.Booster. Its file is LightGBM's own text; loading it runs no code."""

    name = "lightgbm"
    framework = "lightgbm"
    weights_file = "model.txt"
    code_file = None
    module_class = "lightgbm.Booster"
    trusted = ()
    transformer = "tritium.ml.lightgbm.model:LightGBMModel"
    explainer = "tree"

    module: lightgbm.Booster

    def __init__(self, module: lightgbm.Booster) -> None:
        self.module = module

    def save(self, *, by_value: bool) -> Parts:
        return Parts(Text(self.module.model_to_string().encode()), b"" if by_value else None, {})

    @classmethod
    def restore(
        cls, weights: Buffer, facts: Mapping[str, Any], by: Maker | bytes, *, device: str | None = None
    ) -> LightGBMEngine:
        try:
            import lightgbm
        except ModuleNotFoundError as error:
            raise WrongVersion(
                f"The model is LightGBM's, which {sys.executable} does not have: pip install 'tritium[lightgbm]'.",
                library="lightgbm",
            ) from error
        try:
            return cls(lightgbm.Booster(model_str=bytes(weights).decode()))
        except (lightgbm.basic.LightGBMError, UnicodeDecodeError) as error:
            raise ModelError(f"{cls.weights_file} is no model that this LightGBM can read: {error}") from error

    @contextmanager
    def on(self, device: str | None) -> Iterator[LightGBMEngine]:
        """Yield this engine; the only device is the CPU."""
        if device is not None:
            self.check_device(device)
        yield self

    def call(self, batch: Arrays, outputs: Sequence[str]) -> Arrays:
        """Return the booster's prediction of the inputs side by side, `[n]` or `[n, classes]`, as float64."""
        rows = self._rows(batch)
        predictions = np.asarray(self.module.predict(rows, validate_features=False), np.float64)
        return dict.fromkeys(outputs, predictions)

    def contributions(
        self, batch: Arrays, outputs: Sequence[str], *, background: Arrays, samples: int | None, seed: int
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return LightGBM's exact values for the raw score, which need no background."""
        rows = self._rows(batch)
        values = np.asarray(self.module.predict(rows, pred_contrib=True, validate_features=False), np.float64)
        of_class = values.reshape(len(rows), -1, rows.shape[1] + 1)
        return of_class[:, :, :-1].transpose(0, 2, 1), of_class[:, :, -1]

    def _rows(self, batch: Arrays) -> np.ndarray[Any, Any]:
        """Return the inputs side by side, `[n, features]`. Raises ModelError for another number of features."""
        parts = [values.reshape(len(values), -1) for values in batch.values()]
        rows = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
        if rows.shape[1] != self.module.num_feature():
            raise ModelError(f"The model takes {self.module.num_feature()} features, and was given {rows.shape[1]}.")
        if rows.dtype not in (np.float32, np.float64):
            rows = rows.astype(np.float64)
        return rows

    @classmethod
    def check_device(cls, device: str) -> None:
        if device != "cpu":
            raise BadSetting(f"device={device!r}: {_CPU}")

    @classmethod
    def task_device(cls, device: str, gpus: Sequence[str]) -> str:
        cls.check_device(device)
        return device
