"""Looks into a run directory, before anything starts, for the training that a fit would continue (driver)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tritium.checkpoint.format import Damaged
from tritium.checkpoint.identity import differences_of, differences_of_code, refuse, refuse_another, refuse_another_kind
from tritium.checkpoint.store import Store
from tritium.errors import CheckpointFailed
from tritium.ml.early_stopping import stays_stopped
from tritium.ml.epoch_settings import IterativeSettings


def peek(run_dir: str, settings: IterativeSettings, now: Mapping[str, Any]) -> str | None:
    """Return a line for the user about what a fit in this run directory continues from; None where nothing was begun.

    `now` is the identity that the backend gives this training. Raises BadSetting where the checkpoint is of another
    training. None also for a directory that this machine can't read: the ranks check it.
    """
    try:
        path, step, state = _newest(Store(run_dir))
    except (CheckpointFailed, OSError):
        return None
    if state is None:
        return None
    notes = _compare(state, now, settings, path)
    if not settings.keeps_checkpoints:
        return (
            f"the training in {run_dir} starts over, as checkpoint_every is None; its checkpoints, the newest of them "
            f"after step {step}, are neither read nor replaced"
        )
    done, early_stopping = len(state["history"]), state["early_stopping"]
    ended = stays_stopped(state["stopped"], early_stopping, settings.stopping_rule_after(early_stopping))
    rounds = done if ended else settings.rounds  # Early stopping or a callback has ended it.
    doubt = f"; {'; '.join(notes)}" if notes else ""
    if done >= rounds:
        return (
            f"the training in {run_dir} has ended after {done} {settings.unit}s: nothing is left to do, its model is "
            f"returned{doubt}"
        )
    return f"a training in {run_dir} continues: {settings.unit} {done + 1} of {rounds}, after step {step} in all{doubt}"


def _compare(state: Mapping[str, Any], now: Mapping[str, Any], settings: IterativeSettings, path: str) -> list[str]:
    """Return sentences about what may be another training; raise BadSetting for what certainly is.

    The scheduler may differ when the number of epochs does, and the metrics when a training that has ended continues.
    """
    before = state.get("identity_with_code") or state.get("identity")
    if before is None or not {"code"} <= before.keys() & now.keys():
        refuse_another(before, now, path)
        return []
    refuse_another_kind(before, now, path)
    longer, anyway = state["rounds"] != settings.rounds, settings.if_code_changed == "continue"
    allowed = {"lr_scheduler": longer, "metrics": longer and state["finished"]}
    other, notes = differences_of_code(before, now, {name for name in now["code"] if anyway or allowed.get(name)})
    way = (
        " Where code means the same (a line that only prints was added, say), if_code_changed='continue' continues "
        "with the current code."
    )
    refuse(differences_of(before, now, False) + other, path, way if other else "")
    return notes


def _newest(store: Store) -> tuple[str, int, dict[str, Any] | None]:
    """Return path, step and state, without its tensors, of the newest checkpoint that can be read."""
    for name in store.candidates():
        try:
            step, state = store.outline(name)
        except Damaged:  # The ranks report it, and also take the one before it.
            continue
        return store.where(name), step, state
    return "", 0, None
