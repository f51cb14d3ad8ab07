"""A Keras model without its weights: its configuration, and the user's own classes and functions (any process)."""

from __future__ import annotations

import json
import pickle
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from tritium.errors import ModelError
from tritium.model.engines.keras_here import fresh_names, undrawn

Inputs = Mapping[str, tuple[str, tuple[int, ...]]]
"""Input → dtype and shape of a row."""

_LAMBDA = "__lambda__"
_FUNCTION = "give the estimator a function that makes it: model=make_model"
_BUILTIN = ("activations", "losses", "metrics", "initializers", "regularizers", "constraints")


@dataclass(frozen=True)
class Form:
    """The recipe for a Keras model without its weights: a configuration, or a function."""

    config: str | None
    """JSON of Keras's own serialization; None where the model's class has none, and `make` is called."""
    objects: Mapping[str, Any] = field(default_factory=dict)
    """Classes and functions that are not Keras's, by the name under which the configuration has them."""
    has_lambda: bool = False
    """Whether the configuration holds bytecode, that of a Lambda layer."""
    make: Callable[[], Any] | None = None
    inputs: Inputs = field(default_factory=dict)
    """The inputs with which a model that is not built is called once."""

    def code(self) -> bytes:
        """Return the part that runs code when it is loaded, pickled by value; b"" where there is none."""
        if self.config is not None and not self.objects and not self.has_lambda:
            return b""
        from tritium import ship

        return ship.pickle((dict(self.objects), self.has_lambda, None if self.config is not None else self.make))

    @classmethod
    def of_code(cls, config: str | None, code: bytes, inputs: Inputs) -> Form:
        """Return the form of these parts. Running `code` must be trusted; b"" is nothing to run."""
        objects, has_lambda, make = pickle.loads(code) if code else ({}, False, None)
        return cls(config, objects, has_lambda, make, inputs)

    def model(self, *, drawn: bool = True) -> Any:
        """Return a new model with random weights. Raises ModelError where a class or function is missing.

        drawn : False where all weights are put afterwards; those of a configuration are then zeros.
        """
        import keras

        with fresh_names(), nullcontext() if drawn or self.config is None else undrawn():
            if self.config is None:
                if self.make is None:
                    raise ModelError("The model has neither a configuration nor a function that makes it.")
                return built(self.make(), self.inputs)
            try:
                with keras.saving.custom_object_scope(dict(self.objects)):
                    model = keras.saving.deserialize_keras_object(
                        json.loads(self.config), custom_objects=dict(self.objects), safe_mode=not self.has_lambda
                    )
            except (TypeError, ValueError, AttributeError, ImportError) as error:
                if (missing := self._missing()) is None:
                    raise ModelError(
                        f"The model can't be made of its configuration: {_first_line(error)} Let its class have a "
                        f"get_config with the arguments of its __init__, or {_FUNCTION}."
                    ) from error
                raise ModelError(
                    f"The model holds {missing!r}, a class or function of its own that this process does not know. "
                    f"Give it with the model: custom_objects={{{missing!r}: …}}, or register it before the model is "
                    "loaded (keras.saving.register_keras_serializable)."
                ) from error
            return built(model, self.inputs)

    def _missing(self) -> str | None:
        import keras

        names = (name for name, _ in foreign(json.loads(self.config or "null")))
        return next((n for n in names if n not in self.objects and keras.saving.get_registered_object(n) is None), None)


_known: WeakKeyDictionary[Any, Form] = WeakKeyDictionary()


def remember(model: Any, form: Form) -> None:
    """Let `form_of` find the user's objects of this model in `form`, and its `make`."""
    _known[model] = form


def form_of(model: Any, given: Mapping[str, Any] | None = None) -> Form:
    """Return the form of a model.

    given : custom objects by name, beside those that its layers hold.

    Raises ModelError for one that has neither a configuration nor, by `remember`, a function that makes it, and for
    functions and classes in it that can't be found.
    """
    known = _known.get(model, Form(None))
    if known.config is None and known.make is not None:
        return known
    import keras

    try:
        config = keras.saving.serialize_keras_object(model)
    except (NotImplementedError, TypeError, ValueError) as error:
        raise ModelError(
            f"A {type(model).__name__} has no configuration from which it could be made again ({_first_line(error)}). "
            f"Let its class have a get_config, or {_FUNCTION}."
        ) from error
    config = _uncompiled(config)
    objects, has_lambda = own_objects(config, [*model._flatten_layers()], {**known.objects, **(given or {})})
    return Form(json.dumps(config), objects, has_lambda, None, known.inputs)


def _uncompiled(node: Any) -> Any:
    """Return a configuration without the compile settings of the model and of models in it: it predicts without."""
    if isinstance(node, dict):
        return {name: _uncompiled(value) for name, value in node.items() if name != "compile_config"}
    return [_uncompiled(item) for item in node] if isinstance(node, list) else node


def own_objects(config: Any, holders: Iterable[Any], given: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return the classes and functions of a configuration that are not Keras's, and whether it holds bytecode.

    holders : objects whose class or attributes may be those.
    given   : other classes and functions, by name.

    Raises ModelError for one that is in neither.
    """
    import keras

    names, has_lambda = list(foreign(config)), _holds_lambda(config)
    if not names:
        return {}, has_lambda
    candidates = _candidates(holders)
    objects = {}
    for name, kind in names:
        value = given.get(name, given.get(name.rpartition(">")[2]))
        value = keras.saving.get_registered_object(name) if value is None else value
        objects[name] = candidates.get(name) if value is None else value
        if objects[name] is None:
            raise ModelError(
                f"The model holds the {kind} {name!r}, which is none of Keras's and can't be found by that name. Give "
                f"it: custom_objects={{{name!r}: …}}."
            )
    return objects, has_lambda


def foreign(node: Any) -> Iterator[tuple[str, str]]:
    """Yield name and kind ("class", "function") of all that a configuration refers to and that is not Keras's own."""
    if isinstance(node, list | tuple):
        for item in node:
            yield from foreign(item)
    if not isinstance(node, dict):
        return
    kind = node.get("class_name")
    if kind == "function" and isinstance(node.get("config"), str):
        if not _is_builtin(node["config"]):
            yield node["config"], "function"
    elif isinstance(kind, str) and kind != _LAMBDA and "registered_name" in node:
        module = str(node.get("module") or "")
        if module.partition(".")[0] != "keras":
            yield node["registered_name"] or kind, "class"
    for value in node.values():
        yield from foreign(value)


def _is_builtin(name: str) -> bool:
    import keras

    return any(hasattr(getattr(keras, module), name) for module in _BUILTIN)


def _holds_lambda(node: Any) -> bool:
    if isinstance(node, list | tuple):
        return any(map(_holds_lambda, node))
    return isinstance(node, dict) and (node.get("class_name") == _LAMBDA or any(map(_holds_lambda, node.values())))


def _candidates(holders: Iterable[Any]) -> dict[str, Any]:
    """Return the classes of these objects and of their attributes, and functions among these, by Keras's names."""
    import keras

    candidates: dict[str, Any] = {}
    for holder in holders:
        for value in (holder, *vars(holder).values()):
            if isinstance(value, types.FunctionType):
                candidates.setdefault(keras.saving.get_registered_name(value), value)
                candidates.setdefault(value.__name__, value)
            elif hasattr(type(value), "get_config"):
                candidates.setdefault(keras.saving.get_registered_name(type(value)), type(value))
    return candidates


def built(model: Any, inputs: Inputs) -> Any:
    """Return the model, called once with zeros where its weights do not exist yet and its inputs are known."""
    if inputs and not all(layer.built for layer in model._flatten_layers()):
        call(model, zeros(inputs))
    return model


def zeros(inputs: Inputs, rows: int = 2) -> dict[str, Any]:
    """Return rows of zeros of these inputs."""
    import numpy as np

    return {name: np.zeros((rows, *shape), dtype) for name, (dtype, shape) in inputs.items()}


def call(model: Any, batch: Mapping[str, Any]) -> Any:
    """Call the model for a prediction, with one input by position, or several as a dict by name."""
    return model(next(iter(batch.values())) if len(batch) == 1 else dict(batch), training=False)


def named_outputs(model: Any, output: Any) -> dict[str, Any]:
    """Return the outputs of a model by name. Raises ModelError for anything but arrays, or lists and dicts of these."""
    if isinstance(output, Mapping):
        outputs: dict[str, Any] = {str(name): value for name, value in output.items()}
    elif isinstance(output, tuple | list):
        names = list(getattr(model, "output_names", None) or ())
        names = names if len(names) == len(output) == len(set(names)) else [f"output_{i}" for i in range(len(output))]
        outputs = dict(zip(names, output, strict=True))
    else:
        outputs = {"prediction": output}
    if wrong := [name for name, value in outputs.items() if not hasattr(value, "shape") or not len(value.shape)]:
        raise ModelError(
            f"The model's output {wrong[0]!r} is no array with a row for each row of the input. A model must return an "
            "array, or a list or a dict of arrays."
        )
    return outputs


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
