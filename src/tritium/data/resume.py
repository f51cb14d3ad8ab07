"""Checks of saved positions, and their conversion to another world size (rank)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tritium.data.idset import Array, IdSet, rank_of
from tritium.data.order import blocked
from tritium.errors import BadSetting, DataError

State = Mapping[str, Any]
"""The result of `Shard.state()`: JSON."""


def checked_state(state: State, plan: Mapping[str, Any], name: str, index: int) -> State:
    """Return `state`, checked: the position of a rank in a gang of this size.

    plan        : the fields of the EpochPlan that continues from it.
    name, index : the shard that continues from it.

    Raises BadSetting where the state lacks a value, was taken under another plan, or belongs to another rank.
    """
    where = _where(name)
    missing = [key for key in ("epoch", "step", "index", *plan) if key not in state]
    if missing:
        raise BadSetting(f"{where}the state lacks {', '.join(missing)}; give what Shard.state() returned")
    other = [f"{key}={plan[key]!r} (was {state[key]!r})" for key in plan if state[key] != plan[key]]
    if other:
        more = ", or give the states of all ranks as a list" if state["size"] != plan["size"] else ""
        raise BadSetting(f"{where}{', '.join(other)}. Continue with the settings of the state{more}, or start over")
    if "seen" in state and state["index"] != index:
        raise BadSetting(
            f"{where}this epoch continues from each rank's own state, and this is the one of rank "
            f"{state['index']}, given to rank {index}"
        )
    return state


def checked_states(
    states: Sequence[State], plan: Mapping[str, Any], name: str, index: int
) -> tuple[State | None, Sequence[State]]:
    """Return (this rank's own state, ()) where the gang has the size it had, else (None, all states).

    states : of every rank, in rank order. The other arguments are as in `checked_state`.

    Raises BadSetting where a state is missing, or was taken at another position or under another plan.
    """
    where = _where(name)
    if [state.get("index") for state in states] != list(range(states[0].get("size", 0) if states else 1)):
        ranks = ", ".join(str(state.get("index")) for state in states) or "none"
        raise BadSetting(f"{where}it takes the states of all ranks, in rank order, and has those of: {ranks}")
    if all(states[0].get(key) == plan[key] for key in ("size", "batch_size", "window")):
        return checked_state(states[index], plan, name, index), ()
    same = {key: states[0].get(key) for key in ("epoch", "step")}
    same |= {key: plan[key] for key in ("shuffle", "seed", "remainder")}
    for state in states:
        for key, value in same.items():
            if state.get(key) != value:
                raise BadSetting(
                    f"{where}{key}={value!r}, and in the state of rank {state['index']} {state.get(key)!r}"
                )
    return None, states


def resharded(states: Sequence[State], name: str, index: int, counts: Sequence[int], ids: Array, batch: int) -> State:
    """Return the state from which shard `index` continues, so that all together take exactly the rows not yet seen.

    states : of every rank before, in rank order.
    counts : the rows of every index now.
    ids    : this shard's, int64 [rows].
    batch  : the rows per rank and step.

    Every rank computes the same counts without communication: the states list the ids seen, and an id determines which
    rank has it now. The epoch continues at the step that equal steps of the new size would have reached.
    Takes 8 bytes of memory per row seen. Raises DataError where a row that was seen is missing now.
    """
    mine, taken = [np.empty(0, np.int64)], np.zeros(len(counts), np.int64)
    for state in states:
        seen = seen_ids(state)
        owner = rank_of(seen, len(counts))
        taken += np.bincount(owner, minlength=len(counts))
        mine.append(seen[owner == index])
    seen = np.concatenate(mine)
    strange = seen[~IdSet.of(ids).has(seen)]
    if len(strange):
        raise DataError(
            f"shard {name!r} of rank {index} can't resume: {len(strange)} of the {len(seen)} rows that were seen are "
            f"not there, the first with id {int(strange[0])}. The DataFrame has been computed again with other row "
            "ids, or has changed; restart the epoch."
        )
    if not taken.any():
        return {"epoch": states[0]["epoch"], "step": 0}
    step = -(-int(taken.sum()) // (len(counts) * batch))
    left = [step * batch + count - int(done) for count, done in zip(counts, taken, strict=True)]
    return {"epoch": states[0]["epoch"], "step": step, "index": index, "seen": [IdSet.of(seen).pack()], "counts": left}


def seen_ids(state: State) -> Array:
    """Return the ids that a rank had taken in the epoch of its state, int64 [k]."""
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


def _where(name: str) -> str:
    return f"shard {name!r} can't resume: "
