"""A Keras model as text, and as a Tritium model that takes columns (driver)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from tritium import Model
from tritium.integration.keras import (
    Form,
    Input,
    Output,
    Portable,
    PortableModel,
    Signature,
    packed,
    remember,
    unpacked,
)
from tritium_compat.horovod.spark.common.predict import output_name


def shape_of(tensor: Any) -> list[int]:
    """Return the shape of a model's input or output, with -1 for what is not known."""
    return [-1 if part is None else int(part) for part in tensor.shape]


def compiled(model: Any, arguments: Mapping[str, Any], objects: Mapping[str, Any]) -> Any:
    """Compile a model with packed arguments, of which the optimizer is made again."""
    with keras.saving.custom_object_scope(dict(objects)):
        model.compile(**{name: unpacked(value) for name, value in arguments.items()})
    return model


def learning_rate(optimizer: Any) -> float | None:
    """Return the learning rate; None where it follows a schedule."""
    if isinstance(getattr(optimizer, "_learning_rate", None), keras.optimizers.schedules.LearningRateSchedule):
        return None
    return float(keras.ops.convert_to_numpy(optimizer.learning_rate))


def model_of(model: Any, features: Sequence[str], sizes: Sequence[int | None], outputs: int, objects: Any) -> Model:
    """Return a model that takes a number or a row of numbers from each column, and returns rows of numbers.

    sizes : the numbers in a row of each column; None for a scalar.
    """
    inputs, given = [], []
    for number, (tensor, size) in enumerate(zip(model.inputs, sizes, strict=True)):
        column = keras.Input(() if size is None else (size,), name=f"x{number}", dtype=tensor.dtype)
        inputs.append(column)
        given.append(keras.layers.Reshape(tuple(shape_of(tensor)[1:]))(column))
    result = model(given[0] if len(given) == 1 else given)
    listed = list(result) if isinstance(result, list | tuple) else [result]
    flat = [keras.layers.Reshape((-1,), name=output_name(n))(one) for n, one in enumerate(listed[:outputs])]
    whole = keras.Model(inputs, flat[0] if len(flat) == 1 else flat)
    remember(whole, Form(None, dict(PortableModel.of(model, objects).form.objects), False, None, {}))
    taken = [
        Input(column.name, (name,), str(tensor.dtype), () if size is None else (size,))
        for column, name, tensor, size in zip(inputs, features, model.inputs, sizes, strict=True)
    ]
    rows = [math.prod(abs(part) for part in shape_of(one)[1:]) for one in model.outputs[:outputs]]
    names = ["prediction"] if len(flat) == 1 else [output_name(n) for n in range(len(flat))]
    given_back = [Output(name, str(one.dtype), (n,)) for name, one, n in zip(names, model.outputs, rows, strict=False)]
    return Model(whole, Signature(tuple(taken), tuple(given_back)), engine="keras")


def as_parts(model: Any, objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model as what pickle takes: its form, weights, and how it was compiled."""
    portable = PortableModel.of(model, objects)
    optimizer = getattr(model, "optimizer", None)
    state = [keras.ops.convert_to_numpy(one) for one in optimizer.variables] if optimizer is not None else []
    return {"portable": portable, "state": state}


def of_parts(parts: Mapping[str, Any], objects: Mapping[str, Any]) -> Any:
    """Return the model of `as_parts`, compiled as it was."""
    portable: PortableModel = parts["portable"]
    model = portable.model()
    if portable.compiled.get("optimizer") is not None:
        compiled(model, portable.compiled, objects)
        put_state(model.optimizer, model, parts["state"])
    return model


def put_state(optimizer: Any, model: Any, state: Sequence[Any]) -> None:
    """Give an optimizer the values of its variables, which `variables` had in their order."""
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    if len(state) == len(optimizer.variables):
        for variable, value in zip(optimizer.variables, state, strict=True):
            variable.assign(value)


__all__ = ["Portable", "packed", "unpacked"]
