"""The function of a gang's task on its ranks; no Flyte is imported here (rank)."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tritium as tr


def call(function: Callable[..., Any], values: Mapping[str, Any], tables: Sequence[str]) -> Any:
    """Return what `function` returns, of a coroutine its result.

    values : arguments by name.
    tables : names of further arguments, which are the rank's shards of these names.
    """
    value = function(**values, **{name: tr.world().shard(name) for name in tables})
    return asyncio.run(value) if inspect.iscoroutine(value) else value


@dataclass(frozen=True)
class ModelPlace:
    """What a rank gets for a `SavedModel`. `path`: of the model."""

    path: str

    def load(self, trusted: bool = False) -> Any:
        """Return the `tr.Model`, as `tr.load(self.path, trusted)` does."""
        return tr.load(self.path, trusted)
