"""Tritium: big data and deep learning as one job on Apache Spark (any process).

Everything public is here and loads on first use, so that `import tritium` stays light and imports neither torch nor
pyspark.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tritium.data.exchange import Exchange
    from tritium.data.profiling.profile import profile
    from tritium.data.schema import Data
    from tritium.frameworks.keras import Keras
    from tritium.frameworks.tensorflow import TensorFlow
    from tritium.gang.driver.launch import launch, submit
    from tritium.gang.driver.run import Run
    from tritium.gang.rank.fetch import fetch
    from tritium.gang.rank.world import World, world
    from tritium.gang.settings import Gang
    from tritium.model.model import Model, load
    from tritium.model.published import publish
    from tritium.observe.stream import listen
    from tritium.predict.explain import explain
    from tritium.predict.http import http_transformer

__version__ = "0.2.0"

__all__ = [
    "Data",
    "Exchange",
    "Gang",
    "Keras",
    "Model",
    "Run",
    "TensorFlow",
    "World",
    "errors",
    "events",
    "explain",
    "fetch",
    "http_transformer",
    "launch",
    "listen",
    "load",
    "ml",
    "profile",
    "publish",
    "submit",
    "world",
]

_HOME = {
    "Data": "tritium.data.schema",
    "Exchange": "tritium.data.exchange",
    "Gang": "tritium.gang.settings",
    "Keras": "tritium.frameworks.keras",
    "Model": "tritium.model.model",
    "Run": "tritium.gang.driver.run",
    "TensorFlow": "tritium.frameworks.tensorflow",
    "World": "tritium.gang.rank.world",
    "explain": "tritium.predict.explain",
    "fetch": "tritium.gang.rank.fetch",
    "http_transformer": "tritium.predict.http",
    "launch": "tritium.gang.driver.launch",
    "listen": "tritium.observe.stream",
    "load": "tritium.model.model",
    "profile": "tritium.data.profiling.profile",
    "publish": "tritium.model.published",
    "submit": "tritium.gang.driver.launch",
    "world": "tritium.gang.rank.world",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        try:
            value = getattr(importlib.import_module(_HOME[name]), name)
        except ModuleNotFoundError as error:
            value = importlib.import_module("tritium.package").left_on_the_driver(f"tr.{name}", error)
    elif name in ("errors", "events", "ml"):
        value = importlib.import_module(f"tritium.{name}")
    else:
        raise AttributeError(f"module 'tritium' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
