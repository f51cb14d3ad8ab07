"""What a training is, so that another one does not go on from its checkpoints (driver, rank)."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from tritium.data.schema import Field
from tritium.errors import BadSetting, CheckpointFailed
from tritium.ml.settings import TorchSettings, name_of
from tritium.ml.torch.digest import described, digest, is_own
from tritium.ml.torch.dry_run import try_optimizer
from tritium.ml.torch.schedule import stays_stopped
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
    "if_code_changed",
)
_CODE = ("model", "optimizer", "loss", "lr_scheduler", "train_step")  # compared in another way
_GROUP = "optimizer group"
_HELD = "held by the model"  # attributes, which its text need not show, and the weights that it begins with
_LONGEST = 20_000
_ADDRESS = re.compile(r" at 0x[0-9a-f]+", re.IGNORECASE)


def about(settings: TorchSettings, module: torch.nn.Module, optimizer: Any, fields: Iterable[Field]) -> dict[str, Any]:
    """What must be equal for a training to go on: what is trained, on which columns, and by which settings.

    To be taken before a scheduler or a callback changes the optimizer's groups.
    """
    found: dict[str, Any] = {
        name: getattr(settings, name)
        for name in settings.fields()
        if name not in (*_ANY, *_CODE, "feature_cols", "label_cols", "row_key")
    }
    found["optimizer"] = name_of(optimizer)
    for number, group in enumerate(getattr(optimizer, "param_groups", ())):
        options = {name: _plain(value) for name, value in group.items() if name != "params"}
        found |= {f"{_GROUP} {number} {name}": value for name, value in options.items()}
        found[f"{_GROUP} {number} tensors"] = len(group["params"])
    found |= {f"weights {k}": f"{v.dtype} {list(v.shape)}" for k, v in module.state_dict().items()}
    return found | {f"column {f.name}": f"{f.dtype} of {', '.join(f.sources)}" for f in fields}


def planned(settings: TorchSettings, fields: Iterable[Field]) -> dict[str, Any]:
    """What the driver knows of a training, which goes into its checkpoints: `about`, the rows, and digests of code."""
    with torch.random.fork_rng(devices=[]):
        module = settings.make_module()
        optimizer = try_optimizer(settings, module)
        found = about(settings, module, optimizer, fields)
    found["validation"] = settings.validation if isinstance(settings.validation, str | float) else None
    code = {
        "model": [kind for kind in dict.fromkeys(map(type, module.modules())) if is_own(kind)],
        "optimizer": None if optimizer is None else type(optimizer),
        **{name: getattr(settings, name) for name in ("loss", "train_step", "lr_scheduler")},
        "metrics": settings.named_metrics(),
        _HELD: module,
    }
    texts = {name: described(thing) for name, thing in code.items()} | dict.fromkeys(("model", _HELD), name_of(module))
    parts = {name: dict(digest(thing, exact=name == "loss")._asdict()) for name, thing in code.items()}
    return {
        **found,
        "optimizer": None if optimizer is None else found["optimizer"],
        "code": {name: {"text": texts[name], **parts[name]} for name in code},
        "architecture": _ADDRESS.sub("", repr(module))[:_LONGEST],
        "versions": {"Python": ".".join(map(str, sys.version_info[:2])), "torch": str(torch.__version__)},
    }


def refuse_another(
    before: Mapping[str, Any] | None, now: Mapping[str, Any], path: str, *, resized: bool = False
) -> None:
    """BadSetting that names the differences, when the checkpoint at `path` is of another training than this one.

    An optimizer that is None in `now` is not known here. `resized`: the world size is another, from which an optimizer
    may take its settings.
    """
    if before is None:
        raise BadSetting(
            f"{path} is a checkpoint of another kind: world.checkpoint.save in a function that was launched, and no "
            "estimator, wrote it. Name another run_dir.",
            differences=[],
        )
    _refuse(_differences(before, now, resized), path)


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], resized: bool) -> list[str]:
    names = sorted({*before, *now} - {"code", "architecture", "versions"})
    if resized or now.get("optimizer") is None:
        names = [name for name in names if not name.startswith(_GROUP)]
    return [
        f"{name}: {now.get(name)!r}, was {before.get(name)!r}"
        for name in names
        if before.get(name) != now.get(name) and not (name == "optimizer" and now.get(name) is None)
    ]


def _refuse(other: Sequence[str], path: str, more: str = "") -> None:
    if other:
        raise BadSetting(
            f"{path} is a checkpoint of another training: {'; '.join(other)}. Name another run_dir to train anew, "
            f"or go on with what it was begun with.{more}",
            differences=list(other),
        )


def look(run_dir: str, settings: TorchSettings, now: Mapping[str, Any]) -> str | None:
    """What a fit in this run directory goes on from, as a line for who waits; None where nothing was begun.

    `now` is what `planned` says of it. BadSetting where another training was. A directory that this machine can't read
    is left to the ranks.
    """
    try:
        path, step, state = _newest(Store(run_dir))
    except (CheckpointFailed, OSError):
        return None
    if state is None:
        return None
    before = state.get("planned")
    if before is None:  # of something else than an estimator
        refuse_another(state.get("about"), now, path)
        before = now
    other, told = _compare_code(before, now, settings, state)
    way = (
        " Where code means the same (a line that only prints was added, say), if_code_changed='continue' goes on with "
        "that of now."
    )
    _refuse(_differences(before, now, False) + other, path, way if other else "")
    doubt = f"; {'; '.join(told)}" if told else ""
    if settings.checkpoint_every is None:
        return (
            f"the training in {run_dir} begins anew, as checkpoint_every is None; its checkpoints, the newest of them "
            f"after step {step}, are neither read nor replaced"
        )
    done = len(state["history"])
    epochs = done if stays_stopped(state, settings) else settings.epochs  # callbacks or early stopping have ended it
    if state["finished"] and done >= epochs:
        return (
            f"the training in {run_dir} has ended after {done} epochs: nothing is left to do, its model is given back"
            f"{doubt}"
        )
    return f"a training in {run_dir} goes on: epoch {done + 1} of {epochs}, after step {step} in all{doubt}"


def _compare_code(
    before: Mapping[str, Any], now: Mapping[str, Any], settings: TorchSettings, state: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """What is surely another model, loss, step, … than then, and sentences about what can't be known or is allowed.

    A scheduler may be another one for other epochs, and metrics where a training that has ended goes on.
    """
    refused, told, doubtful = list[str](), list[str](), list[str]()
    longer = state["pace"]["epochs"] != settings.epochs
    anyway = settings.if_code_changed == "continue"
    allowed = {"lr_scheduler": longer or anyway, "metrics": (longer and state["finished"]) or anyway}
    versions = {name: (before["versions"][name], version) for name, version in now["versions"].items()}
    same_python, same_torch = (versions[name][0] == versions[name][1] for name in ("Python", "torch"))
    for name, one in now["code"].items():
        if name == _HELD:
            continue
        other = before["code"][name]
        if name == "optimizer" and None in (before["optimizer"], now["optimizer"]):
            continue
        if one["value"] == other["value"] and (one["code"] == other["code"] or not same_python):
            doubtful += [name] * (one["guess"] != other["guess"])
            continue
        renamed = one["text"] != other["text"]
        text = f"{name}: {one['text']}" + (f", was {other['text']}" if renamed else " has changed, or what it captures")
        (told if allowed.get(name, anyway) else refused).append(text)
    held, then = now["code"][_HELD], before["code"].get(_HELD, {})
    if before["architecture"] != now["architecture"]:
        text = f"model: {_first_difference(now['architecture'], before['architecture'])}"
        (refused if same_torch and not anyway else told).append(text)
    elif then and now["code"]["model"] == before["code"]["model"] and held["value"] != then["value"]:
        text = f"model: {held['text']} holds other settings than before, in attributes that its text does not show"
        (refused if same_torch and not anyway else told).append(text)
    elif then and held["guess"] != then["guess"]:
        told.append(
            "the model begins with other weights, or holds other objects: whether it is the same can't be known"
        )
    if doubtful:
        told.append(f"whether what {', '.join(doubtful)} captures is the same can't be known")
    if not same_python:
        was, python = versions["Python"]
        told.append(
            f"it was begun with Python {was}, and this is {python}: whether its code is the same can't be known"
        )
    return refused, told


def _first_difference(now: str, before: str) -> str:
    """The first line that differs between two modules as text."""
    lines, was = now.splitlines(), before.splitlines()
    at = next((i for i, (a, b) in enumerate(zip(lines, was, strict=False)) if a != b), min(len(lines), len(was)))
    shown = [part[at].strip() if at < len(part) else "nothing" for part in (lines, was)]
    return f"{shown[0]}, was {shown[1]}"


def _plain(value: Any) -> Any:
    """An optimizer's option as a checkpoint can keep it."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value if isinstance(value, bool | int | float | str | None) else described(value)


def _newest(store: Store) -> tuple[str, int, dict[str, Any] | None]:
    """Path, step and state, without its tensors, of the newest checkpoint that can be read."""
    for name in store.candidates():
        try:
            step, state = store.outline(name)
        except Damaged:  # the ranks say so, and take the one before it too
            continue
        return store.where(name), step, state
    return "", 0, None
