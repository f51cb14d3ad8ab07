"""Calls a model with batches of arrays, in the same way with and without Spark (any process)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from tritium.errors import ModelError
from tritium.model.signature import Output, Signature, shown

if TYPE_CHECKING:
    from tritium.model.engine import Engine


def score(
    engine: Engine, signature: Signature, inputs: Mapping[str, np.ndarray], *, batch_size: int
) -> dict[str, np.ndarray]:
    """Return every output column for these rows, computed in batches of at most `batch_size`.

    `engine` is one of `Engine.on`, `inputs` are `[rows, *shape]` by name. One scalar gives float64 `[rows]`;
    classification gives `prediction` (the class index as float64 `[rows]`) and `probability` (float64
    `[rows, classes]`); others `[rows, *shape]` in their dtype. For no rows the model is not called, as many can't take
    them; a length that varies is 0 then. Raises ModelError for an output that does not fit the signature.
    """
    rows = len(next(iter(inputs.values())))
    if rows == 0:
        return _empty(signature)
    names = [output.name for output in signature.outputs]
    parts: list[dict[str, np.ndarray]] = []
    for start in range(0, rows, batch_size):
        batch = {name: array[start : start + batch_size] for name, array in inputs.items()}
        parts.append(_columns(signature, engine.call(batch, names), min(batch_size, rows - start)))
    return parts[0] if len(parts) == 1 else {n: np.concatenate([p[n] for p in parts]) for n in parts[0]}


def _columns(signature: Signature, outputs: Mapping[str, np.ndarray], rows: int) -> dict[str, np.ndarray]:
    for output in signature.outputs:
        _check(output, outputs[output.name], rows)
    if signature.task == "classification":
        return _classes(signature, outputs[signature.outputs[0].name])
    return {n: _array(o, outputs[o.name]) for n, o in _named(signature)}


def _named(signature: Signature) -> list[tuple[str, Output]]:
    """Return the outputs with the names of their predictions."""
    if len(signature.outputs) == 1:
        return [("prediction", signature.outputs[0])]
    return [(o.name, o) for o in signature.outputs]


def _empty(signature: Signature) -> dict[str, np.ndarray]:
    """Return the predictions for no rows, by the signature alone."""
    if signature.task == "classification":
        output = signature.outputs[0]
        classes = 2 if output.scalar else output.shape[0] or 0
        return {"prediction": np.empty(0), "probability": np.empty((0, classes))}
    return {
        n: np.empty(0) if o.scalar else np.empty((0, *(w or 0 for w in o.shape)), _dtype(o))
        for n, o in _named(signature)
    }


def _dtype(output: Output) -> str:
    """Return the dtype that `_array` returns for this output; NumPy has no bfloat16."""
    return "float32" if output.dtype in ("bfloat16", "float16") else output.dtype


def _check(output: Output, array: np.ndarray, rows: int) -> None:
    shape = array.shape[1:]
    same = len(shape) == len(output.shape) and all(w in (None, n) for w, n in zip(output.shape, shape, strict=True))
    if array.ndim == 0 or len(array) != rows or not (same or (output.scalar and shape in ((), (1,)))):
        raise ModelError(
            f"Output {output.name!r} should be {shown(output.shape)} with a batch of {rows}, and the module returned "
            f"{list(array.shape)}."
        )


def _array(output: Output, array: np.ndarray) -> np.ndarray:
    if output.scalar:
        return array.reshape(-1).astype(np.float64)
    return array.astype(np.float32) if array.dtype == np.float16 else array


def _classes(signature: Signature, scores: np.ndarray) -> dict[str, np.ndarray]:
    """Return class indices and probabilities, computed in float64, whatever the model computes in."""
    scores = scores.astype(np.float64)
    if signature.outputs[0].scalar:
        chance = scores.reshape(-1, 1)
        chance = _sigmoid(chance) if signature.activation == "sigmoid" else chance
        probability = np.concatenate([1 - chance, chance], axis=1)
    elif signature.activation == "softmax":
        probability = _softmax(scores)
    else:
        probability = _sigmoid(scores) if signature.activation == "sigmoid" else scores
    return {"prediction": probability.argmax(axis=1).astype(np.float64), "probability": probability}


def words_of(signature: Signature, classes: np.ndarray) -> np.ndarray:
    """Return the word of each class index, an object `[rows]`; None for a class that has none."""
    words = np.array([*signature.class_words, None], np.object_)
    labels: np.ndarray = words[np.minimum(classes.astype(np.int64), len(words) - 1)]
    return labels


def _sigmoid(scores: np.ndarray) -> np.ndarray:
    """Return the sigmoid of each score, computed in place."""
    with np.errstate(over="ignore"):  # The exp of a large number is infinite, and 1 / (1 + inf) is 0, as it should be.
        np.exp(np.negative(scores, out=scores), out=scores)
    scores += 1
    np.reciprocal(scores, out=scores)
    return scores


def _softmax(scores: np.ndarray) -> np.ndarray:
    """Return the softmax of each row, computed in place."""
    with np.errstate(invalid="ignore"):  # A row with an infinite score becomes NaN, without a warning.
        scores -= scores.max(axis=1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=1, keepdims=True)
    return scores
