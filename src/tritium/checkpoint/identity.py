"""The identity of a training: what must be equal for it to continue from a checkpoint (driver, rank)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from tritium.arguments import name_of
from tritium.checkpoint.code import Opener, code_of, describe, words_of
from tritium.data.schema import Field
from tritium.errors import BadSetting

Resume: TypeAlias = Literal["same", "code", "any"]
"""What a setting must be in a training that continues, as its field declares it.

"same": an equal value. "code": the same code and objects, as far as the driver can tell, unless if_code_changed says
otherwise. "any": any value, or something else is compared in its place, such as the columns of `feature_cols`.
"""
FORM = 2
"""The form of a training's checkpoint: its parts, and how code is compared. Another one can't be continued."""
_LONGEST = 20_000
"""The most characters of an architecture."""
GROUP = "optimizer group"
"""The prefix of an optimizer's settings in an identity; they may depend on the world size."""
HELD = "held by the model"
"""The key, among the code of an identity, of attributes (the model's text need not show them) and initial weights."""


def declared(settings: Any, resume: Resume) -> list[str]:
    """Return the names of the settings that declare this value of `resume`."""
    return [field.name for field in dataclasses.fields(settings) if field.metadata["resume"] == resume]


def identity_of(settings: Any, fields: Iterable[Field]) -> dict[str, Any]:
    """Return what must be equal in any framework: settings, words and columns."""
    values = {name: plain(getattr(settings, name)) for name in declared(settings, "same")}
    words = {f"vocabulary of {column!r}": words_of(words) for column, words in settings.words().items()}
    return (
        {"form": FORM, "framework": settings.framework}
        | values
        | words
        | {f"column {f.name}": f"{f.dtype} of {', '.join(f.sources)}" for f in fields}
    )


def identity_with_code(
    identity: Mapping[str, Any], settings: Any, things: Mapping[str, Any], model: Any, opened: Opener, architecture: str
) -> dict[str, Any]:
    """Return what the driver knows of a training: its identity, the rows to validate on, and hashes of its code.

    things : what is compared in place of the settings of these names, or beside them.
    model : as it begins, with the text of its `architecture`.
    """
    code = {name: getattr(settings, name) for name in declared(settings, "code")} | dict(things) | {HELD: model}
    texts = {name: describe(thing, opened) for name, thing in code.items()}
    texts |= {"model": name_of(model), HELD: name_of(model)}
    hashes = {name: code_of(thing, opened, weights=name == "loss")._asdict() for name, thing in code.items()}
    return {
        **identity,
        "validation": settings.validation if isinstance(settings.validation, str | float) else None,
        "code": {name: {"text": texts[name], **hashes[name]} for name in code},
        "architecture": architecture[:_LONGEST],
    }


def refuse_another(
    before: Mapping[str, Any] | None, now: Mapping[str, Any], path: str, *, resized: bool = False
) -> None:
    """Raise BadSetting with the differences if the checkpoint at `path` is of another training.

    before, now : the identities of the checkpoint and of this training. An optimizer that is None in `now` is unknown.
    resized : whether the world size is another, on which the settings of an optimizer may depend.
    """
    refuse_another_kind(before, now, path)
    assert before is not None
    refuse(differences_of(before, now, resized), path)


def refuse_another_kind(before: Mapping[str, Any] | None, now: Mapping[str, Any], path: str) -> None:
    """Raise BadSetting if the checkpoint at `path` is none that this version and this estimator continue."""
    if before is None:
        raise BadSetting(
            f"{path} is a checkpoint of another kind: world.checkpoint.save in a function that was launched, and no "
            "estimator, wrote it. Name another run_dir.",
            differences=[],
        )
    form = before.get("form", 1)
    if form != FORM:
        raise BadSetting(
            f"{path} was saved by another version of Tritium: a training's checkpoint of form {form}, and this version "
            f"continues those of form {FORM}. Continue with that version, or name another run_dir to train from the "
            "beginning.",
            differences=[f"form: {FORM}, was {form}"],
        )
    frameworks = now.get("framework"), before.get("framework")
    if frameworks[0] != frameworks[1]:
        raise BadSetting(
            f"{path} is a checkpoint of a training with {frameworks[1]}, and this one is with {frameworks[0]}. Name "
            "another run_dir.",
            differences=["framework: {!r}, was {!r}".format(*frameworks)],
        )


def plain(value: Any) -> Any:
    """Return a setting as it is compared: lists for tuples, dicts for mappings, names of functions, "NaN" for NaN."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and math.isnan(value):
        return "NaN"
    return name_of(value) if callable(value) else value


def differences_of(before: Mapping[str, Any], now: Mapping[str, Any], resized: bool) -> list[str]:
    """Return a text for each difference of two identities, but for their code."""
    names = sorted({*before, *now} - {"code", "architecture", "versions"})
    if resized or now.get("optimizer") is None:
        names = [name for name in names if not name.startswith(GROUP)]
    return [
        f"{name}: {now.get(name)!r}, was {before.get(name)!r}"
        for name in names
        if before.get(name) != now.get(name) and not (name == "optimizer" and now.get(name) is None)
    ]


def refuse(other: Sequence[str], path: str, more: str = "") -> None:
    """Raise BadSetting if there are differences from the training of the checkpoint at `path`."""
    if other:
        raise BadSetting(
            f"{path} is a checkpoint of another training: {'; '.join(other)}. Name another run_dir to train from the "
            f"beginning, or continue with what it was begun with.{more}",
            differences=list(other),
        )


def differences_of_code(
    before: Mapping[str, Any], now: Mapping[str, Any], allowed: Collection[str]
) -> tuple[list[str], list[str]]:
    """Return what is certainly another model, loss, step, …, and sentences about what can't be known or is allowed.

    allowed : the names of code that may differ.
    """
    refused, notes, doubtful = list[str](), list[str](), list[str]()
    for name, one in now["code"].items():
        other = before["code"][name]
        if name == HELD or (name == "optimizer" and None in (before["optimizer"], now["optimizer"])):
            continue
        if one["exact"] == other["exact"]:
            doubtful += [name] * (one["loose"] != other["loose"] or not one["known"])
            continue
        renamed = one["text"] != other["text"]
        text = f"{name}: {one['text']}" + (f", was {other['text']}" if renamed else " has changed, or what it captures")
        (notes if name in allowed else refused).append(text)
    held, held_before = now["code"][HELD], before["code"][HELD]
    unsure = "model" in allowed or before["versions"] != now["versions"]  # Another framework may have other texts.
    if before["architecture"] != now["architecture"]:
        text = f"model: {_first_difference(now['architecture'], before['architecture'])}"
        (notes if unsure else refused).append(text)
    elif now["code"]["model"] == before["code"]["model"] and held["exact"] != held_before["exact"]:
        text = f"model: {held['text']} holds other settings than before, in attributes that its text does not show"
        (notes if unsure else refused).append(text)
    elif held["loose"] != held_before["loose"]:
        notes.append(
            "the model begins with other weights, or holds other objects: whether it is the same can't be known"
        )
    if doubtful:
        notes.append(f"whether {', '.join(doubtful)}, with all that it calls and captures, is the same can't be known")
    return refused, notes


def _first_difference(now: str, before: str) -> str:
    """Return the first line that differs between two modules as text."""
    lines, was = now.splitlines(), before.splitlines()
    at = next((i for i, (a, b) in enumerate(zip(lines, was, strict=False)) if a != b), min(len(lines), len(was)))
    shown = [part[at].strip() if at < len(part) else "nothing" for part in (lines, was)]
    return f"{shown[0]}, was {shown[1]}"
