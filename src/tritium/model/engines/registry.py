"""The engines by name; each is imported when a model of it is used (any process)."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
from typing import TYPE_CHECKING, Any

from tritium.errors import ModelError

if TYPE_CHECKING:
    from tritium.model.engine import Engine
    from tritium.model.leaf import Kind

DEFAULT = "torch"  # Old manifests, which name no engine, are of torch.

_ENGINES = {
    "function": ("tritium.model.engines.function", "FunctionEngine"),
    "torch": ("tritium.model.engines.torch", "TorchEngine"),
    "lightgbm": ("tritium.model.engines.lightgbm", "LightGBMEngine"),
    "keras": ("tritium.model.engines.keras", "KerasEngine"),
    "onnx": ("tritium.model.engines.onnx", "ONNXEngine"),
}
# Looked through before torch, as a keras.Model may be a torch module, too.
_CLASSES = {
    "keras": ("keras", "Model"),
    "lightgbm": ("lightgbm", "Booster"),
    "onnx": ("tritium.model.engines.onnx", "ONNXFile"),
    "function": ("tritium.model.engines.function", "Functions"),
}
# The first module of each is the one that must have been imported before a state can hold such tensors.
_KINDS = {
    "torch": ("torch", "tritium.model.engines.torch_leaf", "TorchTensor"),
    "dtensor": ("torch.distributed.tensor", "tritium.model.engines.torch_sharded", "TorchShard"),
}


def find(name: Any) -> type[Engine]:
    """Return the engine of this name. Raises ModelError for one that is not known."""
    if name not in list(_ENGINES):
        raise ModelError(
            f"The model is one of the engine {name!r}, and this Tritium knows {', '.join(_ENGINES)}. Was it saved by "
            "a later version?"
        )
    module, attribute = _ENGINES[name]
    engine: type[Engine] = getattr(importlib.import_module(module), attribute)
    return engine


def name_of(module: Any) -> str:
    """Return the name of the engine for a framework's own object, a function, or the path of an ONNX file.

    It is torch's for anything else.
    """
    if isinstance(module, str | os.PathLike):
        return "onnx"
    if inspect.isroutine(module) or isinstance(module, functools.partial):
        return "function"
    for name, (package, attribute) in _CLASSES.items():
        model_class = getattr(sys.modules.get(package), attribute, None)
        if model_class is not None and isinstance(module, model_class):
            return name
    return DEFAULT


def kind(name: str) -> Kind | None:
    """Return the Kind of this framework's tensors in a state; None for a framework that is not known."""
    if name not in _KINDS:
        return None
    _, module, attribute = _KINDS[name]
    tensors: Kind = getattr(importlib.import_module(module), attribute)()
    return tensors


def kinds() -> list[Kind]:
    """Return the Kinds of the frameworks that this process has imported: there are no tensors of others."""
    names = [name for name, (module, *_) in _KINDS.items() if module in sys.modules]
    return [of_framework for name in names if (of_framework := kind(name)) is not None]
