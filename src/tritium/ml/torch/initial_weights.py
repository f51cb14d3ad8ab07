"""The weights that a training starts from: those of a trained model, of a module, or of a state_dict (any process)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tritium.errors import BadSetting
from tritium.hints import suggest

if TYPE_CHECKING:
    import torch


def tensors_of(given: Any) -> dict[str, torch.Tensor]:
    """Return tensors by name on the CPU: of a path, a Model, a TorchModel, a module or a state_dict.

    Raises BadSetting for anything else, and ModelError for a path without a model.
    """
    import torch

    if isinstance(given, str | os.PathLike):
        return _saved(os.fspath(given))
    given = getattr(given, "model", given) if hasattr(given, "signature") else given  # a TorchModel's Model
    given = getattr(given, "module", given) if hasattr(given, "engine") else given
    state = given.state_dict() if isinstance(given, torch.nn.Module) else given
    if not isinstance(state, Mapping) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise BadSetting(
            f"initial_weights={type(given).__name__} must be a trained model, the path of a saved one, a module, or a "
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
    own = module.state_dict()
    wrong = [f"{name!r} is none of the module's.{suggest(name, list(own))}" for name in weights if name not in own]
    wrong += [
        f"{name!r} is {list(value.shape)}, and {list(own[name].shape)} in the module."
        for name, value in weights.items()
        if name in own and value.shape != own[name].shape
    ]
    if wrong:
        more = f"\n  … and {len(wrong) - 8} more" * (len(wrong) > 8)
        listed = "".join(f"\n  - {one}" for one in wrong[:8])
        raise BadSetting(
            f"initial_weights don't fit the model:{listed}{more}\nLeave those out that are not to be taken over: "
            "initial_weights={name: tensor, …}.",
            setting="initial_weights",
            problems=wrong,
        )
    module.load_state_dict(dict(weights), strict=False)


def told(module: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    """Return a line for the user about the module's weights that are not among these; none where all are."""
    own = module.state_dict()
    left = [name for name in own if name not in weights]
    if not left:
        return ()
    listed = ", ".join(left[:4]) + (", …" if len(left) > 4 else "")
    return (f"{len(left)} of the module's {len(own)} weights are not in initial_weights, and start as made: {listed}",)
