"""The identity of a training with Keras, so that no other continues from its checkpoints (driver, rank)."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import keras

from tritium.arguments import name_of
from tritium.checkpoint.code import is_own, words_of
from tritium.data.schema import Field
from tritium.errors import ModelError
from tritium.ml.checkpoint import GROUP, HELD, plain
from tritium.ml.keras.digest import KerasDigest
from tritium.ml.keras.settings import KerasSettings
from tritium.ml.settings import OF_PREDICTIONS
from tritium.model.engines.keras_form import form_of

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
    "jit_compile",
    "run_eagerly",
    "backend",
    *OF_PREDICTIONS,
    "decode_threads",
)
_CODE = ("model", "optimizer", "loss", "custom_objects", "decode", "vocabulary")  # compared by digests or names
_LONGEST = 20_000
_BEFORE_CAPITAL = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=.)(?=[A-Z][a-z])")


def identity(settings: KerasSettings, model: Any, fields: Iterable[Field]) -> dict[str, Any]:
    """Return what must be equal for a training to continue: what is trained, on which columns, with which settings.

    model : compiled, and built where that was possible.
    """
    found: dict[str, Any] = {
        name: plain(getattr(settings, name))
        for name in settings.fields()
        if name not in (*_ANY, *_CODE, "feature_cols", "label_cols", "row_key")
    }
    found["loss_weights"] = plain(settings.whole_loss_weights())
    found |= {f"vocabulary of {column!r}": words_of(words) for column, words in settings.words().items()}
    found["optimizer"] = name_of(model.optimizer)
    config = model.optimizer.get_config()
    found |= {f"{GROUP} {name}": _plain(value) for name, value in config.items() if name != "name"}
    found |= {f"weights {n}": f"{v.dtype} {list(v.shape)}" for n, v in enumerate(model.weights)}
    return found | {f"column {f.name}": f"{f.dtype} of {', '.join(f.sources)}" for f in fields}


def identity_with_code(settings: KerasSettings, model: Any, fields: Iterable[Field]) -> dict[str, Any]:
    """Return what the driver knows of a training: `identity`, the rows to validate on, and digests of code."""
    found = identity(settings, model, fields)
    found["validation"] = settings.validation if isinstance(settings.validation, str | float) else None
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
