"""The identity of a training with Keras, so that no other continues from its checkpoints (driver, rank)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import keras

from tritium.arguments import name_of
from tritium.checkpoint import identity as identities
from tritium.checkpoint.code import Opened
from tritium.checkpoint.identity import GROUP, identity_of, plain
from tritium.closures import is_own
from tritium.data.schema import Field
from tritium.errors import ModelError
from tritium.ml.keras.portable import Portable, PortableModel
from tritium.ml.keras.settings import KerasSettings
from tritium.model.engines.keras_form import form_of
from tritium.model.engines.keras_weights import as_array

_BEFORE_CAPITAL = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=.)(?=[A-Z][a-z])")


def identity(settings: KerasSettings, model: Any, fields: Iterable[Field]) -> dict[str, Any]:
    """Return the facts that must be equal for a training to continue: its model, columns and settings.

    model : compiled, and built where that was possible.
    """
    facts = identity_of(settings, fields)
    facts["loss_weights"] = plain(settings.whole_loss_weights())
    facts["optimizer"] = name_of(model.optimizer)
    config = model.optimizer.get_config()
    facts |= {f"{GROUP} {name}": _plain(value) for name, value in config.items() if name != "name"}
    facts |= {f"weights {n}": f"{v.dtype} {list(v.shape)}" for n, v in enumerate(model.weights)}
    return facts


def identity_with_code(settings: KerasSettings, model: Any, fields: Iterable[Field]) -> dict[str, Any]:
    """Return the driver's description of a training: `identity`, the rows to validate on, and hashes of code."""
    facts = identity(settings, model, fields)
    things = {
        "model": [kind for kind in dict.fromkeys(map(type, model._flatten_layers())) if is_own(kind)],
        "optimizer": type(model.optimizer),
        "loss": settings.whole_loss(),
        "custom_objects": dict(settings.custom_objects or {}),
    }
    architecture = _architecture(model, settings.custom_objects or {})
    whole = identities.identity_with_code(facts, settings, things, model, opened, architecture)
    return {**whole, "versions": {"Keras": str(keras.__version__)}}


def opened(thing: Any) -> Opened | None:
    """Take apart a layer, loss, metric or optimizer by its class and configuration; None for any other object."""
    if isinstance(thing, PortableModel):
        form = thing.form
        return Opened(PortableModel, {"config": form.config, "objects": form.objects}, {"weights": thing.weights})
    if isinstance(thing, Portable):
        return Opened(thing.kind, {**_settings(thing.config), "objects": thing.objects})
    if keras.ops.is_tensor(thing):
        return Opened(type(thing), {"values": as_array(thing)})
    if not hasattr(type(thing), "get_config"):  # Keras's lazy modules import all that they themselves are asked for
        return None
    if hasattr(thing, "weights"):  # The configuration is in the architecture already.
        return Opened(type(thing), {}, {"weights": [as_array(variable) for variable in thing.weights]})
    arguments = getattr(thing, "_fn_kwargs", {})  # Huber's delta is in no configuration of Keras 3.15
    if is_own(type(thing)) and isinstance(thing, keras.losses.Loss):  # Its attributes need be in no configuration.
        arguments = {name: value for name, value in vars(thing).items() if not name.startswith("_")}
    return Opened(type(thing), _settings({**arguments, **thing.get_config()}))


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name != "name"}


def _architecture(model: Any, custom_objects: Mapping[str, Any]) -> str:
    """Return the model's configuration in lines; where it has none, its layers."""
    try:
        config = form_of(model, custom_objects).config
    except ModelError:
        config = None
    if config is None:
        return "\n".join(f"{layer.name} {type(layer).__name__}" for layer in model._flatten_layers())
    return _numbered_anew(json.dumps(json.loads(config), indent=0), model)


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
