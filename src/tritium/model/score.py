"""Calls a model with batches of arrays, in the same way with and without Spark (any process)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tritium.errors import ModelError
from tritium.model.bad_rows import is_fatal, is_out_of_memory, reason_of
from tritium.model.calls import CallState
from tritium.model.signature import Output, Signature, shown

if TYPE_CHECKING:
    from tritium.model.engine import Callee


@dataclass(frozen=True)
class Scorer:
    """Calls an engine with batches of rows, and finds the rows for which it raises.

    engine  : one of `Engine.on`, or the connection to one.
    calls   : how many rows it is called with, and what is known of earlier calls.
    isolate : whether an error of the model is that of single rows, which have no predictions then.
    """

    engine: Callee
    signature: Signature
    calls: CallState
    isolate: bool = False

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
        start = 0
        while start < rows:
            size = min(self.calls.rows, rows - start)
            columns, error = self._attempt(inputs, start, size)
            if columns is not None:
                parts.append(columns)
            elif error is not None and is_out_of_memory(error) and size > 1:
                self.calls.on_out_of_memory(size)
                continue
            elif error is not None:
                worked, failed_before = self.calls.has_worked, len(failed)
                parts += self._bisected(inputs, start, size, error, failed)
                if not worked and not parts:
                    _refuse_if_all_fail_alike(error, list(failed.values())[failed_before:])
            start += size
        if not parts:
            return _empty(self.signature), failed
        return parts[0] if len(parts) == 1 else {n: np.concatenate([p[n] for p in parts]) for n in parts[0]}, failed

    def _attempt(
        self, inputs: Mapping[str, np.ndarray], start: int, size: int
    ) -> tuple[dict[str, np.ndarray] | None, Exception | None]:
        """Return the columns of `size` rows from `start`, or the error that the model raised for them."""
        names = [output.name for output in self.signature.outputs]
        batch = {name: array[start : start + size] for name, array in inputs.items()}
        begun = time.perf_counter()
        try:
            columns = _columns(self.signature, self.engine.call(batch, names), size)
        except Exception as error:  # noqa: BLE001 - a model may raise anything for a row
            return None, _without_frames(error) if is_out_of_memory(error) else error
        self.calls.on_success(size, time.perf_counter() - begun)
        return columns, None

    def _bisected(
        self, inputs: Mapping[str, np.ndarray], start: int, size: int, error: Exception, failed: dict[int, str]
    ) -> list[dict[str, np.ndarray]]:
        """Return the predictions of rows that raised `error`, in halves, until the rows that raise are alone.

        failed : gets position → reason of the rows that raise.
        """
        if not self.isolate or is_fatal(error, size):
            raise error
        if size == 1:
            failed[start] = reason_of(error)
            return []
        parts: list[dict[str, np.ndarray]] = []
        for first, count in ((start, size // 2), (start + size // 2, size - size // 2)):
            columns, error_of_half = self._attempt(inputs, first, count)
            if columns is not None:
                parts.append(columns)
            elif error_of_half is not None:
                parts += self._bisected(inputs, first, count, error_of_half, failed)
        return parts


def _without_frames(error: Exception) -> Exception:
    """Return the error without the frames that raised it, whose tensors would stay in memory as long as it."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__context__
    return error


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
