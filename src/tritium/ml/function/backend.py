"""`FunctionBackend`: the user's functions as the backend of an estimator (driver, rank)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tritium import file_system
from tritium.data.schema import Field
from tritium.ml.backend import Backend, DryRun
from tritium.ml.function import training
from tritium.ml.function.settings import FunctionSettings
from tritium.model.engines.function import FunctionEngine
from tritium.model.model import Model
from tritium.model.signature import Output, Signature


class FunctionDryRun(DryRun[FunctionSettings]):
    """An empty dry run: there is no model before the training."""

    @property
    def scores(self) -> tuple[int, ...] | None:
        return None

    @property
    def outputs(self) -> tuple[Output, ...] | None:
        return None

    def train(
        self, settings: FunctionSettings, labels: Mapping[str, Field], shapes: Mapping[str, tuple[int, ...] | None]
    ) -> None:
        return None


class FunctionBackend(Backend[FunctionSettings]):
    """The backend that calls the user's own training function."""

    train = staticmethod(training.train)

    def dry_run(
        self, settings: FunctionSettings, fields: Mapping[str, Field], shapes: Mapping[str, tuple[int, ...]]
    ) -> FunctionDryRun:
        """Return an empty dry run, as there is no model before the training."""
        return FunctionDryRun()

    def identity(self, settings: FunctionSettings, fields: Sequence[Field]) -> dict[str, Any]:
        """Return nothing: the function saves its own checkpoints by `world.checkpoint`."""
        return {}

    def restore(
        self, settings: FunctionSettings, run_dir: str, signature: Signature, history: list[dict[str, Any]]
    ) -> Model:
        """Return the state of rank 0 with `predict` as a Model."""
        facts, _, code = bytes(file_system.read(f"{run_dir}/{training.CODE}")).partition(b"\n")
        engine = FunctionEngine.restore(file_system.read(f"{run_dir}/{training.STATE}"), json.loads(facts), code)
        return Model(engine.module, signature, history=history, engine=FunctionEngine.name)
