"""Calls the user's training function, and stores the state that it returns (rank)."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tritium.arguments import name_of
from tritium.errors import BadSetting
from tritium.gang.rank.world import world as this_world
from tritium.ml.function.settings import FunctionSettings, Trained
from tritium.ml.history import make_json
from tritium.model.engines.function import FunctionEngine, Functions

STATE, CODE = "state.bin", "state.pkl"
_ROWS = 2


def train(
    settings: FunctionSettings, validate: bool, facts: Any, user_run_dir: bool = False, identity: Any = None
) -> dict[str, Any] | None:
    """Train on this rank's shards. Rank 0 stores the state, and returns history, inputs and outputs; others None."""
    world = this_world()
    result = settings.train(world, settings)
    if world.rank != 0:
        return None
    trained = result if isinstance(result, Trained) else Trained(result)
    for entry in trained.history:
        make_json(entry)
    engine = FunctionEngine(Functions(trained.state, settings.predict))
    batch = _example(world, settings)
    outputs = engine.describe(batch)
    parts = engine.save(by_value=True)
    world.store(STATE, map(bytes, parts.weights.stream()))
    assert parts.code is not None
    world.store(CODE, iter([json.dumps(dict(parts.facts)).encode() + b"\n" + parts.code]))
    return {
        "history": trained.history,
        "inputs": {name: (array.dtype.name, array.shape[1:]) for name, array in batch.items()},
        "outputs": {output.name: (output.dtype, output.shape) for output in outputs},
    }


def _example(world: Any, settings: FunctionSettings) -> Mapping[str, np.ndarray[Any, Any]]:
    """Return the inputs of the first rows of this rank."""
    shard = world.shard("train").alone()
    batches: Iterator[Any] = (
        batch for epoch in shard.epochs(1, batch_size=_ROWS, shuffle=False, device=None) for batch in epoch
    )
    (batch,) = itertools.islice(batches, 1)
    wrong = [name for name in settings.inputs() if not isinstance(batch[name], np.ndarray)]
    if wrong:
        raise BadSetting(f"Input {wrong[0]!r} of {name_of(settings.predict)} is no array.")
    return {name: np.array(batch[name]) for name in settings.inputs()}
