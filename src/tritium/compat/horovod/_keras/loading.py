"""`load_model`: a saved model, with its optimizer distributed (rank)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tritium.compat.horovod._keras.optimizer import distribute
from tritium.compat.horovod.options import Options


def load_model(
    keras: Any,
    filepath: Any,
    custom_optimizers: Iterable[type] | None,
    custom_objects: Mapping[str, Any] | None,
    compression: Any,
) -> Any:
    """Return the model, whose optimizer has the state that was saved and reduces gradients over all ranks."""
    custom = {kind.__name__: kind for kind in custom_optimizers or ()} | dict(custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=custom)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return model
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    options = Options(name=f"Distributed{type(inner).__name__}", compression=compression)
    made = distribute(optimizer, options)
    if made is not optimizer:
        model.optimizer = made
    return model
