"""Looks into a run directory, before anything starts, for the training that a fit would continue (driver)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tritium.checkpoint.format import Damaged
from tritium.checkpoint.identity import HELD, differences_of, refuse, refuse_another
from tritium.checkpoint.store import Store
from tritium.errors import CheckpointFailed
from tritium.ml.early_stopping import stays_stopped
from tritium.ml.epoch_settings import EpochSettings


def peek(run_dir: str, settings: EpochSettings, now: Mapping[str, Any]) -> str | None:
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
    before = state.get("identity_with_code")
    if before is None:  # no estimator wrote it
        refuse_another(state.get("identity"), now, path)
        before = now
    other, notes = _compare_code(before, now, settings, state)
    way = (
        " Where code means the same (a line that only prints was added, say), if_code_changed='continue' continues "
        "with the current code."
    )
    refuse(differences_of(before, now, False) + other, path, way if other else "")
    doubt = f"; {'; '.join(notes)}" if notes else ""
    if settings.checkpoint_every is None:
        return (
            f"the training in {run_dir} starts over, as checkpoint_every is None; its checkpoints, the newest of them "
            f"after step {step}, are neither read nor replaced"
        )
    done = len(state["history"])
    ended = stays_stopped(state["stopped"], state["early_stopping"], settings.stopping_rule())  # or by a callback
    epochs = done if ended else settings.epochs
    if state["finished"] and done >= epochs:
        return (
            f"the training in {run_dir} has ended after {done} epochs: nothing is left to do, its model is returned"
            f"{doubt}"
        )
    return f"a training in {run_dir} continues: epoch {done + 1} of {epochs}, after step {step} in all{doubt}"


def _compare_code(
    before: Mapping[str, Any], now: Mapping[str, Any], settings: EpochSettings, state: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """Return what is certainly another model, loss, step, …, and sentences about what can't be known or is allowed.

    The scheduler may differ when `epochs` does, and the metrics when a training that has ended continues.
    """
    refused, notes, doubtful = list[str](), list[str](), list[str]()
    longer = state["epochs"] != settings.epochs
    anyway = settings.if_code_changed == "continue"
    allowed = {"lr_scheduler": longer or anyway, "metrics": (longer and state["finished"]) or anyway}
    versions = {name: (before["versions"].get(name), version) for name, version in now["versions"].items()}
    same_python = versions["Python"][0] == versions["Python"][1]
    same_framework = all(was == version for name, (was, version) in versions.items() if name != "Python")
    for name, one in now["code"].items():
        if name == HELD:
            continue
        other = before["code"][name]
        if name == "optimizer" and None in (before["optimizer"], now["optimizer"]):
            continue
        if one["value"] == other["value"] and (one["code"] == other["code"] or not same_python):
            doubtful += [name] * (one["guess"] != other["guess"])
            continue
        renamed = one["text"] != other["text"]
        text = f"{name}: {one['text']}" + (f", was {other['text']}" if renamed else " has changed, or what it captures")
        (notes if allowed.get(name, anyway) else refused).append(text)
    held, then = now["code"][HELD], before["code"].get(HELD, {})
    if before["architecture"] != now["architecture"]:
        text = f"model: {_first_difference(now['architecture'], before['architecture'])}"
        (refused if same_framework and not anyway else notes).append(text)
    elif then and now["code"]["model"] == before["code"]["model"] and held["value"] != then["value"]:
        text = f"model: {held['text']} holds other settings than before, in attributes that its text does not show"
        (refused if same_framework and not anyway else notes).append(text)
    elif then and held["guess"] != then["guess"]:
        notes.append(
            "the model begins with other weights, or holds other objects: whether it is the same can't be known"
        )
    if doubtful:
        notes.append(f"whether what {', '.join(doubtful)} captures is the same can't be known")
    if not same_python:
        was, python = versions["Python"]
        notes.append(
            f"it was begun with Python {was}, and this is {python}: whether its code is the same can't be known"
        )
    return refused, notes


def _first_difference(now: str, before: str) -> str:
    """Return the first line that differs between two modules as text."""
    lines, was = now.splitlines(), before.splitlines()
    at = next((i for i, (a, b) in enumerate(zip(lines, was, strict=False)) if a != b), min(len(lines), len(was)))
    shown = [part[at].strip() if at < len(part) else "nothing" for part in (lines, was)]
    return f"{shown[0]}, was {shown[1]}"


def _newest(store: Store) -> tuple[str, int, dict[str, Any] | None]:
    """Return path, step and state, without its tensors, of the newest checkpoint that can be read."""
    for name in store.candidates():
        try:
            step, state = store.outline(name)
        except Damaged:  # the ranks report it, and also take the one before it
            continue
        return store.where(name), step, state
    return "", 0, None
