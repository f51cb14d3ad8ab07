"""Calls a model with batches of arrays, in the same way with and without Spark (any process)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tritium.errors import ModelError
from tritium.model.bad_rows import is_fatal, reason_of
from tritium.model.signature import Output, Signature, shown

if TYPE_CHECKING:
    from tritium.model.engine import Engine


@dataclass
class Scorer:
    """Calls an engine with batches of rows, and finds the rows for which it raises.

    engine     : one of `Engine.on`.
    batch_size : rows of a call, at most.
    isolate    : whether an error of the model is that of single rows, which have no predictions then.
    """

    engine: Engine
    signature: Signature
    batch_size: int
    isolate: bool = False
    has_worked: bool = False
    """Whether the model has returned predictions for a row. Until then an error of all rows is the model's."""

    def score(self, inputs: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[int, str]]:
        """Return every output column for these rows, and position → reason of the rows for which the model raised.

        inputs : `[rows, *shape]` by name.

        One scalar gives float64 `[rows]`; classification gives `prediction` (the class index as float64 `[rows]`) and
        `probability` (float64 `[rows, classes]`); others `[rows, *shape]` in their dtype; rows that failed are not
        among them. For no rows the model is not called, as many can't take them; a length that varies is 0 then.
        Raises ModelError for an output that does not fit the signature, and the model's own error where it is no row's.
        """
        rows = len(next(iter(inputs.values())))
        parts: list[dict[str, np.ndarray]] = []
        failed: dict[int, str] = {}
        for start in range(0, rows, self.batch_size):
            batch = {name: array[start : start + self.batch_size] for name, array in inputs.items()}
            try:
                parts.append(self._called(batch))
            except Exception as error:  # noqa: BLE001 - a model may raise anything for a row
                failed_before = len(failed)
                parts += self._bisected(batch, start, error, failed)
                if not self.has_worked and not parts:
                    _refuse_if_all_fail_alike(error, list(failed.values())[failed_before:])
            self.has_worked = self.has_worked or bool(parts)
        if not parts:
            return _empty(self.signature), failed
        return parts[0] if len(parts) == 1 else {n: np.concatenate([p[n] for p in parts]) for n in parts[0]}, failed

    def _called(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        names = [output.name for output in self.signature.outputs]
        return _columns(self.signature, self.engine.call(batch, names), len(next(iter(batch.values()))))

    def _bisected(
        self, batch: Mapping[str, np.ndarray], start: int, error: Exception, failed: dict[int, str]
    ) -> list[dict[str, np.ndarray]]:
        """Return the predictions of a batch that raised `error`, in halves, until the rows that raise are alone.

        start  : the position of the batch's first row. failed : gets position → reason of the rows that raise.
        """
        rows = len(next(iter(batch.values())))
        if not self.isolate or is_fatal(error, rows):
            raise error
        if rows == 1:
            failed[start] = reason_of(error)
            return []
        parts: list[dict[str, np.ndarray]] = []
        for first, last in ((0, rows // 2), (rows // 2, rows)):
            half = {name: array[first:last] for name, array in batch.items()}
            try:
                parts.append(self._called(half))
            except Exception as error_of_half:  # noqa: BLE001 - a model may raise anything for a row
                parts += self._bisected(half, start + first, error_of_half, failed)
        return parts


def _refuse_if_all_fail_alike(error: Exception, reasons: list[str]) -> None:
    """Raise `error` where the first rows of a model, more than one, have all failed for one reason: then it is its own.

    One row alone can't tell: a stream may begin with a bad event.
    """
    if len(reasons) > 1 and len(set(reasons)) == 1:
        raise error


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
