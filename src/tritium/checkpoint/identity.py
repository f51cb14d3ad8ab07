"""The identity of a training: what must be equal for it to continue from a checkpoint (driver, rank)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from tritium.arguments import name_of
from tritium.checkpoint.code import words_of
from tritium.data.schema import Field
from tritium.errors import BadSetting

Resume: TypeAlias = Literal["same", "code", "any"]
"""What a setting must be in a training that continues, as its field declares it.

"same": an equal value. "code": the same code and objects, as far as the driver can tell, unless if_code_changed says
otherwise. "any": any value, or something else is compared in its place, such as the columns of `feature_cols`.
"""
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
    return values | words | {f"column {f.name}": f"{f.dtype} of {', '.join(f.sources)}" for f in fields}


def rows_of(settings: Any) -> str | float | None:
    """Return which rows are validated on, as the driver compares it; None for those of another DataFrame."""
    return settings.validation if isinstance(settings.validation, str | float) else None


def refuse_another(
    before: Mapping[str, Any] | None, now: Mapping[str, Any], path: str, *, resized: bool = False
) -> None:
    """Raise BadSetting with the differences if the checkpoint at `path` is of another training.

    before, now : the identities of the checkpoint and of this training. An optimizer that is None in `now` is unknown.
    resized : whether the world size is another, on which the settings of an optimizer may depend.
    """
    if before is None:
        raise BadSetting(
            f"{path} is a checkpoint of another kind: world.checkpoint.save in a function that was launched, and no "
            "estimator, wrote it. Name another run_dir.",
            differences=[],
        )
    refuse(differences_of(before, now, resized), path)


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
