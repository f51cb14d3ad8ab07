"""Keras's objects as classes and configurations, without variables, as they are sent to ranks (driver, rank)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tritium.errors import BadSetting, ModelError
from tritium.model.engines.keras_form import Form, form_of, own_objects
from tritium.model.engines.keras_here import imported
from tritium.model.engines.keras_weights import as_array, put

_OF_BACKENDS = "keras.src.backend."  # On torch, Adam(…) is an object of a variant of that class for torch.


@dataclass(frozen=True)
class Portable:
    """An optimizer or a metric: its class, its configuration, and the user's functions and classes in it."""

    kind: type
    config: dict[str, Any]
    objects: dict[str, Any]

    def made(self) -> Any:
        """Return a new object, without a state."""
        keras = imported()
        with keras.saving.custom_object_scope(self.objects):
            return self.kind.from_config(dict(self.config))  # type: ignore[attr-defined]


def packed(value: Any) -> Any:
    """Return the value with each object of Keras that has variables as a Portable."""
    if isinstance(value, Mapping):
        return {name: packed(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [packed(item) for item in value]
    if isinstance(value, type) or not (hasattr(value, "get_config") and hasattr(value, "variables")):
        return value
    config = value.get_config()
    kind = next(kind for kind in type(value).__mro__ if not kind.__module__.startswith(_OF_BACKENDS))
    return Portable(kind, config, own_objects(config, [value], {})[0])


def unpacked(value: Any) -> Any:
    """Return the value with a new object for each Portable."""
    if isinstance(value, Portable):
        return value.made()
    if isinstance(value, Mapping):
        return {name: unpacked(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [unpacked(item) for item in value]
    return value


@dataclass(frozen=True)
class PortableModel:
    """A model: its form, its weights in their order where it has any yet, and how it was compiled."""

    form: Form
    weights: list[np.ndarray[Any, Any]] | None
    compiled: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, model: Any, custom_objects: Mapping[str, Any]) -> PortableModel:
        """Return the model as it is now. Raises BadSetting for one that can't be made again."""
        try:
            form = form_of(model, custom_objects)
        except ModelError as error:
            raise BadSetting(str(error), setting="model") from error
        ready = model.weights and all(layer.built for layer in model._flatten_layers())
        weights = [np.array(as_array(variable)) for variable in model.weights] if ready else None
        compiled = {name: packed(value) for name, value in compile_arguments(model).items()}
        return cls(form, weights, compiled)

    def __call__(self) -> Any:
        return self.model()

    def model(self) -> Any:
        """Return a new model with these weights, not compiled. Raises BadSetting where its code is missing."""
        try:
            model = self.form.model(drawn=self.weights is None)
            if self.weights is not None:
                put(model.weights, self.weights)
        except ModelError as error:
            raise BadSetting(str(error), setting="model") from error
        return model


def compile_arguments(model: Any) -> dict[str, Any]:
    """Return the arguments with which a model was compiled, as its own objects; {} where it was not."""
    if not getattr(model, "compiled", False):
        return {}
    arguments: dict[str, Any] = {"optimizer": model.optimizer}
    if model._compile_loss is not None:
        arguments |= {"loss": model._compile_loss._user_loss, "loss_weights": model._compile_loss._user_loss_weights}
    if model._compile_metrics is not None:
        plain, weighted = model._compile_metrics._user_metrics, model._compile_metrics._user_weighted_metrics
        arguments["metrics"] = _joined(plain, weighted)
    return arguments


def _joined(one: Any, other: Any) -> Any:
    """Return metrics and weighted metrics together, in the form of the first."""
    if not one or not other:
        return one or other
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return {name: [*_listed(one.get(name)), *_listed(other.get(name))] for name in {**one, **other}}
    if isinstance(one, Mapping) or isinstance(other, Mapping):
        raise BadSetting(
            "the model was compiled with metrics as a mapping and weighted_metrics as a list, or the other way. "
            "Give the estimator metrics=."
        )
    return [*one, *other]


def _listed(metrics: Any) -> list[Any]:
    return list(metrics) if isinstance(metrics, list | tuple) else [] if metrics is None else [metrics]
