"""The frameworks that ranks can be set up for, by name (driver and rank). Importing this imports none of them."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Literal

from tritium import aliases
from tritium.frameworks.framework import Framework

_CLASSES = {
    "torch": "tritium.frameworks.torch:Torch",
    "lightning": "tritium.frameworks.lightning:Lightning",
    "huggingface": "tritium.frameworks.huggingface:HuggingFace",
    "keras": "tritium.frameworks.keras:Keras",
    "tensorflow": "tritium.frameworks.tensorflow:TensorFlow",
    "jax": "tritium.frameworks.jax:JAX",
    "lightgbm": "tritium.frameworks.lightgbm:LightGBM",
    "mpi": "tritium.frameworks.mpi:MPI",
    "horovod": "tritium.frameworks.horovod:Horovod",
}
# A function that imports one of these expects that framework to connect the ranks. mpi4py is refused in the rank;
# transformers and accelerate connect them by torchrun's variables, whatever the framework.
_PACKAGES = {
    "horovod": "horovod",  # First, as whoever imports it beside TensorFlow means it.
    "lightning": "lightning",
    "pytorch_lightning": "lightning",
    "keras": "keras",
    "tensorflow": "tensorflow",
    "tf_keras": "tensorflow",
    "jax": "jax",
    "lightgbm": "lightgbm",
}
NAMES = tuple(_CLASSES)


def find(framework: str | Framework | None) -> Framework | None:
    """Return the framework of that name with its default settings; an instance, and None, as it is."""
    if not isinstance(framework, str):
        return framework
    return _class(framework)()


def to_json(framework: Framework | None) -> dict[str, Any] | None:
    """Return name and settings as JSON; `from_json` is the inverse."""
    return None if framework is None else {"name": framework.name, **asdict(framework)}


def from_json(description: Mapping[str, Any] | None) -> Framework | None:
    """Make the framework that `to_json` described."""
    if description is None:
        return None
    settings = {name: value for name, value in description.items() if name != "name"}
    return _class(description["name"])(**settings)


def unnamed(framework: Framework | None, imports: Callable[[str], bool]) -> str | None:
    """Return a warning where the user's code imports a framework that ranks are not set up for; None if it does not.

    imports : whether the code imports a package.
    """
    if "horovod" in aliases.active() and imports("horovod"):
        return None  # Horovod's collectives connect the ranks.
    covered = () if framework is None else (*framework.modules, *framework.covers)
    known = {module.partition(".")[0] for module in covered} | set(aliases.active())
    package = next((name for name in _PACKAGES if name not in known and imports(name)), None)
    if package is None:
        return None
    reason = f"framework={framework.name!r} does" if framework else "without framework= Tritium does"
    return (
        f"The function imports {package}, which {reason} not connect to the other ranks: each would train by itself. "
        f"Give framework={_PACKAGES[package]!r}; or ignore this if that is meant."
    )


@functools.cache
def patterns(kind: Literal["secondary", "aborts"]) -> tuple[re.Pattern[str], ...]:
    """Return the patterns of all frameworks that show that another rank has ended: see `Framework`."""
    of_frameworks = (getattr(_class(name), kind) for name in NAMES)
    return tuple(pattern for pattern in of_frameworks if pattern is not None)


def _class(name: str) -> type[Framework]:
    module, _, attribute = _CLASSES[name].partition(":")
    framework_class: type[Framework] = getattr(importlib.import_module(module), attribute)
    return framework_class
