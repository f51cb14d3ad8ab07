"""Checks labels, losses and outputs of a model against each other (driver, rank)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tritium.arguments import name_of
from tritium.data.schema import Field
from tritium.errors import BadData, BadSetting
from tritium.ml.keras.settings import KerasSettings, loss_name, loss_option, loss_problems, losses_in
from tritium.model.signature import Output, shown

Classes = Mapping[str, tuple[int | None, int | None]]
"""Label of classes → the number of scores, and an index that is no class (None: there is none).

Without a number, one score is compared with 0 or 1, or a number between."""


def check_labels(
    settings: KerasSettings,
    labels: Mapping[str, Field],
    shapes: Mapping[str, tuple[int, ...] | None],
    outputs: Sequence[Output] | None,
) -> Classes:
    """Return the labels of class indices, by the losses and outputs that belong to the labels.

    labels  : their batch columns.
    shapes  : label → shape of a row; None where it is not known yet.
    outputs : None where they are not known yet: then only the losses are checked.

    Raises BadData and BadSetting where numbers, names or shapes don't fit.
    """
    classes: dict[str, tuple[int | None, int | None]] = {}
    for name, (loss, output) in _by_label(settings, list(labels), outputs).items():
        if output is None:
            continue
        if loss_name(loss) == "sparsecategoricalcrossentropy" and len(output.shape):
            classes[name] = int(output.shape[-1] or 0), loss_option(loss, "ignore_class")
            continue
        if loss_name(loss) == "binarycrossentropy" and output.scalar:
            classes[name] = None, None
        if (shape := shapes[name]) is not None:
            _refuse_shapes(loss, labels[name], shape, output)
    return classes


def _by_label(
    settings: KerasSettings, labels: Sequence[str], outputs: Sequence[Output] | None
) -> dict[str, tuple[Any, Output | None]]:
    """Return each label's loss and output. Raises BadData and BadSetting where their numbers or names don't fit."""
    loss = settings.whole_loss()
    if wrong := list(loss_problems(loss)):
        raise BadSetting(" ".join(wrong), setting="loss")
    shown_loss = loss if isinstance(loss, str) else name_of(loss)
    if len(labels) > 1 and len(losses_in(loss)) == 1 and not isinstance(loss, Mapping | list | tuple):
        raise BadSetting(
            f"label_cols names {len(labels)} labels, and loss={shown_loss} is one. Give each output its own: "
            f"loss={{{', '.join(f'{name!r}: …' for name in labels)}}}.",
            setting="loss",
        )
    if outputs is None:
        return {}
    names = [output.name for output in outputs]
    if len(labels) != len(outputs):
        listed = ", ".join(f"{output.name} {shown(output.shape)}" for output in outputs)
        raise BadData(
            f"label_cols names {len(labels)} label{'s' * (len(labels) > 1)}, and the model returns {len(outputs)} "
            f"output{'s' * (len(outputs) > 1)}: {listed}. Give a label for each output: "
            f"label_cols={{{', '.join(f'{name!r}: […]' for name in names)}}}."
        )
    if len(labels) == 1:
        return {labels[0]: (next(iter(losses_in(loss)), None), outputs[0])}
    if set(labels) != set(names):
        raise BadData(
            f"label_cols names the labels {', '.join(map(repr, labels))}, and the model's outputs are "
            f"{', '.join(map(repr, names))}. A label has the name of its output."
        )
    if isinstance(loss, Mapping):
        if unknown := [name for name in loss if name not in names]:
            raise BadSetting(f"loss names {unknown[0]!r}, and the model's outputs are {', '.join(map(repr, names))}.")
        loss_of = dict(loss)
    else:
        loss_of = dict(zip(names, loss, strict=False))
    by_name = {output.name: output for output in outputs}
    return {name: (loss_of.get(name), by_name[name]) for name in labels}


def _refuse_shapes(loss: Any, label: Field, shape: tuple[int, ...], output: Output) -> None:
    """Raise BadData where a loss of Keras's would broadcast output and label: it trains silently wrong."""
    rows = tuple(output.shape)
    if not loss_name(loss) or rows == shape or (rows in ((), (1,)) and shape in ((), (1,))):
        return
    advice = ""
    if shape == () and label.dtype == "int64":
        advice = ' One integer column means class indices; a score per class has "sparse_categorical_crossentropy".'
    raise BadData(
        f"The model's output {output.name!r} is {shown(rows)}, and the label of {label.source_names} is "
        f"{shown(shape)}: one would be broadcast against the other, and training would go silently wrong.{advice} Let "
        f"its last layer give {shown(shape)}, or name as many label columns as it has outputs.",
        output=rows,
        label=shape,
    )
