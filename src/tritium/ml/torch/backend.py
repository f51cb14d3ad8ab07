"""`TorchBackend`: PyTorch as the backend of an estimator (driver, rank)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tritium import file_system
from tritium.arguments import takes_vocabulary
from tritium.data.schema import Field
from tritium.ml.backend import Backend
from tritium.ml.torch import loop
from tritium.ml.torch.dry_run import TorchDryRun, try_optimizer
from tritium.ml.torch.identity import identity_with_code, opened
from tritium.ml.torch.module import make_module, tensors_of
from tritium.ml.torch.settings import TorchSettings
from tritium.model.engines import torch_weights as weights
from tritium.model.model import Model
from tritium.model.signature import Signature


class TorchBackend(Backend[TorchSettings]):
    """The backend that trains a `torch.nn.Module` under DDP."""

    opened = staticmethod(opened)
    train = staticmethod(loop.train)

    def loaded(self, settings: TorchSettings) -> TorchSettings:
        """Return the settings with the initial weights as tensors."""
        if settings.initial_weights is None:
            return settings
        return dataclasses.replace(settings, initial_weights=tensors_of(settings.initial_weights))

    def dry_run(
        self, settings: TorchSettings, fields: Mapping[str, Field], shapes: Mapping[str, tuple[int, ...]]
    ) -> TorchDryRun:
        """Call the module with zeros."""
        return TorchDryRun(settings, fields, shapes)

    def identity(self, settings: TorchSettings, fields: Sequence[Field]) -> dict[str, Any]:
        """Return the identity, taken of a new module and its optimizer."""
        with torch.random.fork_rng(devices=[]):
            module = make_module(settings)
            return identity_with_code(settings, module, try_optimizer(settings, module), fields)

    def restore(
        self, settings: TorchSettings, run_dir: str, signature: Signature, history: list[dict[str, Any]]
    ) -> Model:
        """Return a new module with the weights of rank 0, in eval mode, as a Model."""
        module = make_module(settings)
        module.load_state_dict(weights.read(file_system.read(f"{run_dir}/{loop.WEIGHTS}")))
        module.eval()
        by_value = isinstance(settings.model, torch.nn.Module) or takes_vocabulary(settings.model)
        origin = None if by_value else settings.model
        recipe: dict[str, Any] = {"origin": origin, "seed": settings.seed, "transform": settings.transform}
        return Model(module, signature, history=history, **recipe)
