"""From the positions of a gang of one size to the position of a rank in a gang of another size (rank)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tritium.data.idset import Array, IdSet, dealt_to
from tritium.data.order import blocked
from tritium.errors import DataError

State = Mapping[str, Any]


def resized(states: Sequence[State], name: str, index: int, counts: Sequence[int], ids: Array, batch: int) -> State:
    """The state from which shard `index` continues, so that all together take exactly the rows not yet seen.

    states : of every rank before, in rank order. counts : rows of every index now. ids : this shard's.

    Every rank finds the same counts without asking the others: the states say which ids were seen, and an id says
    whose it is now. The epoch continues at the step that it would have come to in even steps of the new size.
    Needs memory for the rows seen, 8 bytes each.
    """
    mine, taken = [np.empty(0, np.int64)], np.zeros(len(counts), np.int64)
    for state in states:
        seen = seen_in(state)
        owner = dealt_to(seen, len(counts))
        taken += np.bincount(owner, minlength=len(counts))
        mine.append(seen[owner == index])
    seen = np.concatenate(mine)
    strange = seen[~IdSet.of(ids).has(seen)]
    if len(strange):
        raise DataError(
            f"shard {name!r} of rank {index} can't resume: {len(strange)} of the {len(seen)} rows that were seen are "
            f"not there, the first with id {int(strange[0])}. The DataFrame has been computed again with other row "
            "ids, or has changed; start the epoch anew."
        )
    if not taken.any():
        return {"epoch": states[0]["epoch"], "step": 0}
    step = -(-int(taken.sum()) // (len(counts) * batch))
    left = [step * batch + count - int(done) for count, done in zip(counts, taken, strict=True)]
    return {"epoch": states[0]["epoch"], "step": step, "index": index, "seen": [IdSet.of(seen).pack()], "counts": left}


def seen_in(state: State) -> Array:
    """The ids that a rank had taken in the epoch of its state, int64 [k]."""
    if state["step"] == 0:
        return np.empty(0, np.int64)
    if "seen" in state:
        return np.concatenate([IdSet.unpack(text).ids() for text in state["seen"]])
    ids = np.sort(np.concatenate([IdSet.unpack(text).ids() for text in state["ids"]]))
    taken = min(state["step"] * state["batch_size"], len(ids))
    if state["shuffle"] is False:
        return ids[:taken]
    order = blocked(len(ids), state["block"], state["seed"], state["epoch"], state["index"])
    return ids[order(np.arange(taken))]
