"""The dry run: a model on two rows of zeros, before anything starts (driver)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tritium.arguments import name_of, refuse_methods
from tritium.data.schema import Field
from tritium.errors import BadData, BadSetting, ModelError, TritiumError
from tritium.ml.backend import DryRun
from tritium.ml.keras.labels import Classes, check_labels
from tritium.ml.keras.settings import KerasSettings
from tritium.model.engines.keras_form import Inputs, built, call, named_outputs, zeros
from tritium.model.engines.keras_here import fresh_names, imported, set_random_seed
from tritium.model.signature import Output, shown

Shapes = Mapping[str, tuple[int, ...]]
_ROWS = 2
_OF_WORDS = ("StringLookup", "TextVectorization")
_COLORS = re.compile(r"\x1b\[\d*m")
_VALUES = re.compile(r"\[\[[-+\d.,\s\[\]e]*\]\]")
"""Matches the values of a batch, which every back end shows whole in its errors."""


@dataclass(frozen=True)
class KerasFacts:
    """The result of the dry run for the ranks."""

    inputs: Inputs = field(default_factory=dict)
    """Empty where the length of an array column is unknown."""
    classes: Classes = field(default_factory=dict)
    tried: bool = False
    """Whether losses and metrics have been tried; they are not where the length of a label is unknown."""


@contextmanager
def drawing(seed: int) -> Iterator[None]:
    """Seed Python, NumPy and the back end for the block as in a rank, and restore the first two's generators."""
    import random

    keras = imported()
    before = random.getstate(), np.random.get_state()
    torch_state: Any = None
    if keras.backend.backend() == "torch":
        import torch

        torch_state = torch.get_rng_state()
    set_random_seed(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        if torch_state is not None:
            torch.set_rng_state(torch_state)


class KerasDryRun(DryRun[KerasSettings]):
    """A model on zeros; it is not called where the shape of an input is not known before the first row."""

    def __init__(self, settings: KerasSettings, fields: Mapping[str, Field], shapes: Shapes) -> None:
        """Make, compile and call the model. Raises BadSetting and, with the shapes, BadData."""
        refuse_methods(settings.callbacks, imported(settings.backend).callbacks.Callback, optional=True)
        self._inputs: Inputs = {}
        if set(settings.inputs()) <= set(shapes):
            self._inputs = {name: (fields[name].dtype, tuple(shapes[name])) for name in settings.inputs()}
        with drawing(settings.seed), fresh_names():
            self.model = _made(settings)
            self._outputs = None if not self._inputs else _called(self.model, self._inputs, fields)

    @property
    def scores(self) -> tuple[int, ...] | None:
        """The shape of a row of the output; None where it is not known, or not one array."""
        if self._outputs is None or len(self._outputs) != 1:
            return None
        return tuple(self._outputs[0].shape)  # type: ignore[arg-type]

    @property
    def outputs(self) -> tuple[Output, ...] | None:
        """The outputs of the model for a prediction; None where it could not be called."""
        return self._outputs

    def train(
        self, settings: KerasSettings, labels: Mapping[str, Field], shapes: Mapping[str, tuple[int, ...] | None]
    ) -> KerasFacts:
        """Check labels, losses and outputs against each other, and build loss and metrics. Raises the errors above."""
        classes = check_labels(settings, labels, shapes, self._outputs)
        known = {name: shape for name, shape in shapes.items() if shape is not None}
        tried = bool(self._inputs) and len(known) == len(labels)
        if tried:
            with drawing(settings.seed), fresh_names():
                _build(settings, self.model, self._inputs, labels, known)
            _refuse_monitor(settings, self.model)
        return KerasFacts(self._inputs, classes, tried)


def build(model: Any, batch: Sequence[Any]) -> None:
    """Make all variables of model, metrics and optimizer, as `fit` does, for a batch like this one."""
    model._symbolic_build(data_batch=tuple(batch))


def _made(settings: KerasSettings) -> Any:
    try:
        return settings.compiled(settings.make_model())
    except TritiumError:
        raise
    except Exception as error:
        raise BadSetting(f"model={name_of(settings.model)} could not be made and compiled: {_text(error)}") from error


def _called(model: Any, inputs: Inputs, fields: Mapping[str, Field]) -> tuple[Output, ...]:
    listed = "".join(
        f"\n  - {fields[name].described(f'{shown(shape)} {fields[name].dtype}')}" for name, (_, shape) in inputs.items()
    )
    try:
        built(model, inputs)
        outputs = named_outputs(model, call(model, zeros(inputs)))
        alone = _tried_alone(model, inputs)
    except ModelError as error:
        raise BadData(str(error)) from error
    except Exception as error:
        flat = [fields[name].sources[0] for name, (_, shape) in inputs.items() if not shape]
        hint = f"\nFor [batch, 1] give a list: feature_cols=[{flat[0]!r}]." if len(flat) == len(inputs) == 1 else ""
        hint = _lookup(model, fields) or _reshaped(model, inputs) or hint
        names = getattr(model, "input_names", None)
        takes = f"\nIts inputs are {', '.join(map(repr, names))}." if names and len(inputs) > 1 else ""
        raise BadData(
            f"The model can't take these features: {_text(error)}\nIt was called with{listed}{takes}{hint}",
            shapes={name: shape for name, (_, shape) in inputs.items()},
        ) from error
    keras = imported()
    for name, value in outputs.items():
        shape, one = tuple(value.shape), alone.get(name, ())
        if shape != (_ROWS, *shape[1:]) or one != (1, *shape[1:]):
            raise BadData(
                f"The model's output {name!r} is {list(shape)} for {_ROWS} rows and {list(one)} for one. "
                "Let it have a row for each row, also where a batch has one: name the dimension that goes, "
                "squeeze(x, -1) of keras.ops."
            )
    return tuple(
        Output(name, keras.backend.standardize_dtype(value.dtype), tuple(value.shape[1:]))
        for name, value in outputs.items()
    )


def _tried_alone(model: Any, inputs: Inputs) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the outputs for one row, as a batch may have one. Raises BadData if the model fails."""
    try:
        output = call(model, zeros(inputs, 1))
    except Exception as error:
        raise BadData(
            f"The model takes two rows, and given one row alone it fails: {_text(error)}. A batch may have one row."
        ) from error
    if isinstance(output, Mapping | list | tuple):
        return {name: tuple(value.shape) for name, value in named_outputs(model, output).items()}
    return {"prediction": tuple(output.shape)}


def _lookup(model: Any, fields: Mapping[str, Field]) -> str:
    """Return advice for a layer of words that gets indices; else ""."""
    coded = [field.sources[0] for field in fields.values() if field.vocabulary is not None or field.buckets is not None]
    layers = [type(layer).__name__ for layer in model._flatten_layers() if type(layer).__name__ in _OF_WORDS]
    if not coded or not layers:
        return ""
    return (
        f"\nThe model has a {layers[0]}, which takes words, and column {coded[0]!r} comes as their index. Leave the "
        "layer out: the Embedding after it gets the index."
    )


def _reshaped(model: Any, inputs: Inputs) -> str:
    """Return the layer to write where the model's one input has as many numbers in another shape; else ""."""
    takes, rows = getattr(model, "input_shape", None), [shape for _, shape in inputs.values()]
    if not isinstance(takes, tuple) or len(rows) != 1 or None in takes[1:] or np.prod(takes[1:]) != np.prod(rows[0]):
        return ""
    return (
        f"\nIts input is {shown(takes[1:])}, which has as many numbers: begin with the layers Input({rows[0]}) and "
        f"Reshape({takes[1:]})."
    )


def _build(settings: KerasSettings, model: Any, inputs: Inputs, labels: Mapping[str, Field], shapes: Shapes) -> None:
    """Build loss and metrics for zeros. Raises BadData where they can't take these outputs and labels."""
    x = zeros(inputs)
    y = {name: np.zeros((_ROWS, *shapes[name]), labels[name].dtype) for name in labels}
    batch = (
        next(iter(x.values())) if len(x) == 1 else x,
        y if isinstance(settings.label_cols, Mapping) else next(iter(y.values())),
    )
    try:
        build(model, batch)
    except Exception as error:
        listed = "".join(
            f"\n  - the label {labels[name].described(f'{shown(shapes[name])} {labels[name].dtype}')}"
            for name in labels
        )
        raise BadData(
            f"Loss or metrics can't take what there is: {_text(error)}\nThey are called with{listed}"
        ) from error


def _refuse_monitor(settings: KerasSettings, model: Any) -> None:
    rule = settings.stopping_rule()
    if rule is None:
        return
    known = list(model.get_metrics_result())
    known += [f"validation_{name}" for name in known] if settings.validation is not None else []
    if rule.monitor not in known:
        raise BadSetting(f"early_stopping monitors {rule.monitor!r}; the history will have {', '.join(known)}.")


def _text(error: Exception) -> str:
    text = _VALUES.sub("[…]", _COLORS.sub("", str(error)))
    lines = [line for line in text.splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:3])}"
