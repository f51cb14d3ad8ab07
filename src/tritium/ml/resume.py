"""What a training is, so that another one does not go on from its checkpoints (driver, rank)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from tritium.data.schema import Field
from tritium.errors import BadSetting, CheckpointFailed
from tritium.ml.settings import TorchSettings, name_of
from tritium.model.checkpoint import Damaged, Store

_ANY = (
    "epochs",
    "callbacks",
    "metrics",
    "early_stopping",
    "verbose",
    "validation",
    "checkpoint_every",
    "checkpoint_keep",
    "if_data_changed",
)
_CODE = ("model", "optimizer", "loss", "lr_scheduler", "train_step")  # may be rewritten, and mean the same


def about(settings: TorchSettings, module: torch.nn.Module, optimizer: Any, fields: Iterable[Field]) -> dict[str, Any]:
    """What must be equal for a training to go on: what is trained, on which columns, and by which settings."""
    found: dict[str, Any] = {
        name: getattr(settings, name)
        for name in settings.fields()
        if name not in (*_ANY, *_CODE, "feature_cols", "label_cols", "row_key")
    }
    found["optimizer"] = name_of(optimizer)
    found |= {f"weights {k}": f"{v.dtype} {list(v.shape)}" for k, v in module.state_dict().items()}
    return found | {f"column {f.name}": f"{f.dtype} of {', '.join(f.sources)}" for f in fields}


def refuse_another(
    before: Mapping[str, Any] | None, now: Mapping[str, Any], path: str, *, resized: bool = False
) -> None:
    """BadSetting that names the differences, when the checkpoint at `path` is of another training than this one.

    A name that is None in `now` is not known here.
    """
    if before is None:
        raise BadSetting(
            f"{path} is a checkpoint of another kind: world.checkpoint.save in a function that was launched, and no "
            "estimator, wrote it. Name another run_dir.",
            differences=[],
        )
    other = [
        f"{name}: {now.get(name)!r}, was {before.get(name)!r}"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name) and not (name == "optimizer" and now.get(name) is None)
    ]
    if other:
        raise BadSetting(
            f"{path} is a checkpoint of another training: {'; '.join(other)}. Name another run_dir to train anew, "
            "or go on with what it was begun with.",
            differences=other,
        )


def look(run_dir: str, settings: TorchSettings, fields: Iterable[Field]) -> str | None:
    """What a fit in this run directory goes on from, as a line for who waits; None where nothing was begun.

    BadSetting where another training was. A directory that this machine can't read is left to the ranks.
    """
    try:
        path, step, state = _newest(Store(run_dir))
    except (CheckpointFailed, OSError):
        return None
    if state is None:
        return None
    refuse_another(state.get("about"), _planned(settings, fields), path)
    if settings.checkpoint_every is None:
        return (
            f"the training in {run_dir} begins anew, as checkpoint_every is None; its checkpoints, the newest of them "
            f"after step {step}, are neither read nor replaced"
        )
    done = len(state["history"])
    epochs = done if state["stopped"] else settings.epochs  # callbacks or early stopping have ended it
    if state["finished"] and done >= epochs:
        return (
            f"the training in {run_dir} has ended after {done} epochs: nothing is left to do, its model is given back"
        )
    return f"a training in {run_dir} goes on: epoch {done + 1} of {epochs}, after step {step} in all"


def _newest(store: Store) -> tuple[str, int, dict[str, Any] | None]:
    """Path, step and state, without its tensors, of the newest checkpoint that can be read."""
    for name in store.candidates():
        try:
            step, state = store.outline(name)
        except Damaged:  # the ranks say so, and take the one before it too
            continue
        return store.where(name), step, state
    return "", 0, None


def _planned(settings: TorchSettings, fields: Iterable[Field]) -> dict[str, Any]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        module = settings.make_module()
        try:
            optimizer = settings.optimizer(module.parameters())
        except Exception:  # noqa: BLE001 - of a library that only the ranks have, perhaps: they look at it again
            optimizer = None
        found = about(settings, module, optimizer, fields)
    return found | ({"optimizer": None} if optimizer is None else {})
