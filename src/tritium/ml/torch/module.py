"""The module of a training: how it is made, and the weights that it starts from (any process)."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from tritium.arguments import name_of, takes_vocabulary
from tritium.errors import BadSetting
from tritium.hints import suggest
from tritium.ml.torch.compiling import COMPILED, is_compiled
from tritium.ml.torch.setting_checks import of_another_framework
from tritium.ml.torch.settings import TorchSettings

if TYPE_CHECKING:
    import torch

_LISTED = 8


class ModuleSettings(Protocol):
    """The part of `TorchSettings` and `LightningSettings` that a module is made and called by."""

    @property
    def model(self) -> Any: ...
    @property
    def initial_weights(self) -> Any: ...
    @property
    def task(self) -> Any: ...
    @property
    def validation(self) -> Any: ...
    @property
    def transform(self) -> Any: ...
    @classmethod
    def fields(cls) -> tuple[str, ...]: ...
    def has_own_step(self) -> bool: ...
    def label_sources(self) -> dict[str, str | list[str]]: ...
    def inputs(self) -> dict[str, str | list[str]]: ...


def make_module(settings: TorchSettings) -> torch.nn.Module:
    """Return a new module: the function's, or a copy of the one that was given.

    Every call of the function draws the same random numbers, so that what is in no state_dict (random features, a
    buffer that is not persistent) is the same in all ranks, on the driver, and in the model that is loaded.

    Raises BadSetting where `model` makes something else, and where `initial_weights` don't fit.
    """
    import torch

    from tritium.model.engines.torch_module import seeded

    if isinstance(settings.model, torch.nn.Module):
        module = copy.deepcopy(settings.model)
    else:
        with seeded(settings.seed):
            module = settings.model(settings.words()) if takes_vocabulary(settings.model) else settings.model()
    if not isinstance(module, torch.nn.Module):
        kind = of_another_framework(module) or f"a {type(module).__name__}, not a torch.nn.Module."
        raise BadSetting(f"model={name_of(settings.model)} returned {kind}", setting="model")
    if is_compiled(module):
        raise BadSetting(f"model={name_of(settings.model)} returned {COMPILED}", setting="model")
    if settings.initial_weights is not None:
        take_weights(module, settings.initial_weights)
    return module


# ---- the weights to start from


def tensors_of(source: Any) -> dict[str, torch.Tensor]:
    """Return tensors by name on the CPU: of a path, a Model, a TorchModel, a module or a state_dict.

    Raises BadSetting for anything else, and ModelError for a path without a model.
    """
    import torch

    if isinstance(source, str | os.PathLike):
        return _saved(os.fspath(source))
    source = getattr(source, "model", source) if hasattr(source, "signature") else source  # A TorchModel has a Model.
    source = getattr(source, "module", source) if hasattr(source, "engine") else source
    state = source.state_dict() if isinstance(source, torch.nn.Module) else source
    if not isinstance(state, Mapping) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise BadSetting(
            f"initial_weights={type(source).__name__} must be a trained model, the path of a saved one, a module, or a "
            "mapping from names to tensors, as state_dict() returns it.",
            setting="initial_weights",
        )
    return {name: value.detach().cpu() for name, value in state.items()}


def _saved(path: str) -> dict[str, torch.Tensor]:
    """Return the weights of a saved model, without running its code."""
    from tritium.model import files
    from tritium.model.engines.torch import TorchEngine
    from tritium.model.engines.torch_weights import read

    path = files.located(path)
    manifest, _ = files.read_manifest(path)
    if manifest.get("engine", TorchEngine.name) != TorchEngine.name:
        raise BadSetting(
            f"initial_weights={path!r} is a model of {manifest['engine']}, and holds no torch weights.",
            setting="initial_weights",
        )
    return dict(read(files.read(path, TorchEngine.weights_file, manifest)))


def take_weights(module: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Give the module these weights; those that it has beside them stay. Raises BadSetting where some don't fit."""
    before = module.state_dict()
    problems = [
        f"{name!r} is none of the module's.{suggest(name, list(before))}" for name in weights if name not in before
    ]
    problems += [
        f"{name!r} is {list(value.shape)}, and {list(before[name].shape)} in the module."
        for name, value in weights.items()
        if name in before and value.shape != before[name].shape
    ]
    if problems:
        more = f"\n  … and {len(problems) - _LISTED} more" * (len(problems) > _LISTED)
        listed = "".join(f"\n  - {problem}" for problem in problems[:_LISTED])
        raise BadSetting(
            f"initial_weights don't fit the model:{listed}{more}\nLeave those out that are not to be taken over: "
            "initial_weights={name: tensor, …}.",
            setting="initial_weights",
            problems=problems,
        )
    module.load_state_dict(dict(weights), strict=False)


def note_of_others(module: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    """Return a line for the user about the module's weights that are not among these; none where all are."""
    names = list(module.state_dict())
    others = [name for name in names if name not in weights]
    if not others:
        return ()
    listed = ", ".join(others[:4]) + (", …" if len(others) > 4 else "")
    return (
        f"{len(others)} of the module's {len(names)} weights are not in initial_weights, and start as made: {listed}",
    )
