"""How the module of a training with Lightning is made (driver, rank)."""

from __future__ import annotations

from typing import Any

from tritium.arguments import name_of, takes_vocabulary
from tritium.errors import BadSetting
from tritium.ml.lightning.settings import LightningSettings, is_module, module_problems, without_trainer
from tritium.ml.torch.module import take_weights
from tritium.model.engines.torch_module import seeded


def make_module(settings: LightningSettings) -> Any:
    """Return a new module: the function's, or a copy of the one that was given. Every call draws the same numbers.

    Raises BadSetting for anything but a LightningModule that can train and predict.
    """
    if is_module(settings.model):
        module = without_trainer(settings.model)
    else:
        with seeded(settings.seed):
            module = settings.model(settings.words()) if takes_vocabulary(settings.model) else settings.model()
    if not is_module(module):
        raise BadSetting(f"model={name_of(settings.model)} returned a {type(module).__name__}, no LightningModule.")
    if problems := list(module_problems(module, validates=settings.validation is not None)):
        raise BadSetting(" ".join(problems), setting="model")
    if settings.initial_weights is not None:
        take_weights(module, settings.initial_weights)
    return module
