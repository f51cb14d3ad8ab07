"""Code written for other libraries runs where those are not installed: `import tritium.compat` (any process).

`import horovod.torch as hvd` then imports `tritium_compat.horovod.torch`, in this process and in the ranks of every
launch. An installed package comes first: it is imported under its name as before. Nothing is patched. Where triton is
installed, it is imported before TensorFlow: the other way round, it ends the process.

Importing this package itself changes nothing: `tritium.compat` calls `activate`.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any

from tritium.errors import TritiumWarning
from tritium.integration import active_aliases, add_aliases, before_import, import_triton, installed

_ALIASES = {
    "horovod": "tritium_compat.horovod",
    "petastorm": "tritium_compat.petastorm",
    "sparkdl": "tritium_compat.sparkdl",
    "spark_tensorflow_distributor": "tritium_compat.spark_tensorflow_distributor",
    "tensorflowonspark": "tritium_compat.tensorflowonspark",
}
_CLASSES = {
    "TorchDistributor": "torch_distributor",
    "DeepspeedTorchDistributor": "deepspeed_distributor",
    "MirroredStrategyRunner": "spark_tensorflow_distributor",
    "HorovodRunner": "sparkdl",
}


def __getattr__(name: str) -> Any:
    if name not in _CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_CLASSES[name]}"), name)


def status() -> dict[str, str]:
    """Return package -> the module of Tritium that is imported by its name, or "installed: " and where it is."""
    active = active_aliases()
    return {package: active.get(package) or f"installed: {installed(package)}" for package in _ALIASES}


def activate() -> None:
    """Let the names of other libraries mean these modules, wherever the libraries are not installed."""
    add_aliases(_ALIASES)
    before_import("tensorflow", import_triton)
    own = [f"{package} ({installed(package)})" for package in _ALIASES if package not in active_aliases()]
    if own:
        warnings.warn(
            f"tritium.compat leaves installed packages as they are: {', '.join(own)}. Uninstall them to use Tritium's.",
            TritiumWarning,
            stacklevel=3,
        )
