"""What the first batch shows that a user should know (rank 0)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from tritium.ml.settings import Settings

_ROWS = 256
_SPAN = 1000


def notes(settings: Settings, batch: Mapping[str, Any], layers: Iterable[Any]) -> Iterator[str]:
    """Yield lines for the user about the features and the label of a batch, arrays or tensors by name.

    layers : those of the model; where one of them normalises, nothing is said about scales.
    """
    if not settings.verbose:
        return
    normalises = settings.normalize or getattr(settings, "transform", None) is not None
    if not normalises and not any("Norm" in type(layer).__name__ for layer in layers):
        yield from _scales(settings, batch)
    for name, source in settings.label_sources().items():
        if settings.task == "classification" and settings.is_of_one_score(name):
            label = _array(batch[name]).reshape(-1)
            if len(between := label[(label > 0) & (label < 1)]):
                column = source if isinstance(source, str) else source[0]
                yield (
                    f"label column {column!r} holds {between[0]:g}: predictions are the classes 0 and 1, with the "
                    f'chance of 1 in {settings.probability_col!r}. task="regression" predicts the model\'s output'
                )


def _scales(settings: Settings, batch: Mapping[str, Any]) -> Iterator[str]:
    scales: list[tuple[float, str]] = []
    for name, source in settings.inputs().items():
        values = _array(batch[name])
        if values.dtype.kind != "f" or values.ndim > 2:
            continue
        largest = np.abs(values.reshape(len(values), -1)).max(axis=0, initial=0.0)
        sources = [source] if isinstance(source, str) else source
        names = sources if len(sources) == len(largest) else [f"{sources[0]}[{i}]" for i in range(len(largest))]
        scales += [(float(scale), name) for scale, name in zip(largest, names, strict=True) if 0 < scale < np.inf]
    if not scales or max(scales)[0] < _SPAN * min(scales)[0]:
        return
    (small, least), (large, most) = min(scales), max(scales)
    yield (
        f"features of different scales: up to {small:.3g} in {least!r}, and up to {large:.3g} in {most!r}, from which "
        "gradients learn slowly, or nothing. normalize=True learns their means and deviations"
    )


def _array(value: Any) -> np.ndarray[Any, Any]:
    """Return the first rows of an array or a tensor."""
    value = value[:_ROWS]
    if hasattr(value, "detach"):  # It is a tensor of torch.
        value = value.detach().float().cpu().numpy() if value.is_floating_point() else value.detach().cpu().numpy()
    return np.asarray(value)
