"""`LightningBackend`: Lightning as the backend of an estimator (driver, rank)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tritium import file_system
from tritium.arguments import takes_vocabulary
from tritium.data.schema import Field
from tritium.ml.backend import Backend
from tritium.ml.lightning import training
from tritium.ml.lightning.dry_run import LightningDryRun
from tritium.ml.lightning.identity import identity_with_code
from tritium.ml.lightning.module import make_module
from tritium.ml.lightning.settings import LightningSettings, is_module
from tritium.ml.torch.identity import opened
from tritium.ml.torch.module import tensors_of
from tritium.model.engines import torch_weights as weights
from tritium.model.model import Model
from tritium.model.signature import Signature


class LightningBackend(Backend[LightningSettings]):
    """The backend that trains a LightningModule by a Trainer."""

    opened = staticmethod(opened)
    train = staticmethod(training.train)

    def loaded(self, settings: LightningSettings) -> LightningSettings:
        """Return the settings with the initial weights as tensors."""
        if settings.initial_weights is None:
            return settings
        return dataclasses.replace(settings, initial_weights=tensors_of(settings.initial_weights))

    def dry_run(
        self, settings: LightningSettings, fields: Mapping[str, Field], shapes: Mapping[str, tuple[int, ...]]
    ) -> LightningDryRun:
        """Call the module with zeros."""
        return LightningDryRun(settings, fields, shapes)

    def identity(self, settings: LightningSettings, fields: Sequence[Field]) -> dict[str, Any]:
        """Return the identity, taken of a new module."""
        with torch.random.fork_rng(devices=[]):
            return identity_with_code(settings, make_module(settings), fields)

    def restore(
        self, settings: LightningSettings, run_dir: str, signature: Signature, history: list[dict[str, Any]]
    ) -> Model:
        """Return a new module with the weights of rank 0, in eval mode, as a Model."""
        module = make_module(settings)
        module.load_state_dict(weights.read(file_system.read(f"{run_dir}/{training.WEIGHTS}")))
        module.eval()
        by_value = is_module(settings.model) or takes_vocabulary(settings.model)
        origin = None if by_value else settings.model
        return Model(module, signature, history=history, origin=origin, seed=settings.seed)
