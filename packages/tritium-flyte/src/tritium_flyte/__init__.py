"""Flyte's tasks on Tritium: gangs, tables by version, saved models, retries by class, a live report (any process).

Also called `tritium.flyte`. Its names load on first use: a rank that gets a `Table` imports neither flyte nor pyspark.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tritium_flyte.driver.caching import cache
    from tritium_flyte.driver.context import run_dir, session
    from tritium_flyte.driver.models import SavedModel
    from tritium_flyte.driver.tasks import Gang, Spark
    from tritium_flyte.tables import Table, TableGone

__all__ = ["Gang", "SavedModel", "Spark", "Table", "TableGone", "cache", "run_dir", "session"]

_HOME = {
    "Gang": "tritium_flyte.driver.tasks",
    "SavedModel": "tritium_flyte.driver.models",
    "Spark": "tritium_flyte.driver.tasks",
    "Table": "tritium_flyte.tables",
    "TableGone": "tritium_flyte.tables",
    "cache": "tritium_flyte.driver.caching",
    "run_dir": "tritium_flyte.driver.context",
    "session": "tritium_flyte.driver.context",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tritium.flyte' has no attribute {name!r}. It has: {', '.join(__all__)}.")
    value = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
