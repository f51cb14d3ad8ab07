"""The identity of a training with Keras, so that no other continues from its checkpoints (driver, rank)."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import keras

from tritium.arguments import name_of
from tritium.checkpoint.code import is_own
from tritium.checkpoint.identity import GROUP, HELD, identity_of, plain, rows_of
from tritium.data.schema import Field
from tritium.errors import ModelError
from tritium.ml.keras.digest import KerasDigest
from tritium.ml.keras.settings import KerasSettings
from tritium.model.engines.keras_form import form_of

_LONGEST = 20_000
_BEFORE_CAPITAL = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=.)(?=[A-Z][a-z])")


def identity(settings: KerasSettings, model: Any, fields: Iterable[Field]) -> dict[str, Any]:
    """Return what must be equal for a training to continue: what is trained, on which columns, with which settings.

    model : compiled, and built where that was possible.
    """
    found = identity_of(settings, fields)
    found["loss_weights"] = plain(settings.whole_loss_weights())
    found["optimizer"] = name_of(model.optimizer)
    config = model.optimizer.get_config()
    found |= {f"{GROUP} {name}": _plain(value) for name, value in config.items() if name != "name"}
    found |= {f"weights {n}": f"{v.dtype} {list(v.shape)}" for n, v in enumerate(model.weights)}
    return found


def identity_with_code(settings: KerasSettings, model: Any, fields: Iterable[Field]) -> dict[str, Any]:
    """Return what the driver knows of a training: `identity`, the rows to validate on, and digests of code."""
    found = identity(settings, model, fields)
    found["validation"] = rows_of(settings)
    code = {
        "model": [kind for kind in dict.fromkeys(map(type, model._flatten_layers())) if is_own(kind)],
        "optimizer": type(model.optimizer),
        "loss": settings.whole_loss(),
        "custom_objects": dict(settings.custom_objects or {}),
        "metrics": settings.metrics,
        "decode": settings.decode,
        HELD: model,
    }
    texts = {name: KerasDigest.describe(thing) for name, thing in code.items()}
    texts |= dict.fromkeys(("model", HELD), name_of(model))
    parts = {name: dict(KerasDigest.of(thing)._asdict()) for name, thing in code.items()}
    return {
        **found,
        "code": {name: {"text": texts[name], **parts[name]} for name in code},
        "architecture": _architecture(model, settings.custom_objects or {}),
        "versions": {"Python": ".".join(map(str, sys.version_info[:2])), "Keras": str(keras.__version__)},
    }


def _architecture(model: Any, custom_objects: Mapping[str, Any]) -> str:
    """Return the model's configuration in lines; where it has none, its layers."""
    try:
        config = form_of(model, custom_objects).config
    except ModelError:
        config = None
    if config is None:
        return "\n".join(f"{layer.name} {type(layer).__name__}" for layer in model._flatten_layers())
    return _numbered_anew(json.dumps(json.loads(config), indent=0), model)[:_LONGEST]


def _numbered_anew(config: str, model: Any) -> str:
    """Return the configuration with automatic names by place: "dense_7" counts all layers of a session."""
    for place, layer in enumerate(model._flatten_layers()):
        usual = _BEFORE_CAPITAL.sub("_", type(layer).__name__).lower()
        if re.fullmatch(rf"{usual}(_\d+)?", str(layer.name)):
            config = config.replace(f'"{layer.name}"', f'"{usual} {place}"')
    return config


def _plain(value: Any) -> Any:
    """Return an optimizer's option as a checkpoint can hold it."""
    if isinstance(value, bool | int | float | str | None):
        return value
    return json.dumps(value, default=name_of, sort_keys=True)
