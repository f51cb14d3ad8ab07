"""Digests of Keras's objects, to compare them between sessions (driver)."""

from __future__ import annotations

import json
import zlib
from typing import Any

import numpy as np

from tritium.arguments import name_of
from tritium.checkpoint.code import SHORT, CodeDigest, Parts
from tritium.ml.keras.portable import Portable, PortableModel
from tritium.model.engines.keras_weights import as_array


class KerasDigest(CodeDigest):
    """A digest of a layer, model, loss, metric or optimizer by its class and its configuration."""

    @classmethod
    def describe(cls, thing: Any) -> str:
        """Return a short text for messages: `Adam(learning_rate=0.01, …)`, a name."""
        if isinstance(thing, list | tuple):
            return f"[{', '.join(cls.describe(item) for item in thing)}]"[:SHORT]
        if isinstance(thing, str):
            return repr(thing)
        if isinstance(thing, Portable):
            return cls._described(thing.kind.__name__, thing.config)
        if _has_config(thing) and not hasattr(thing, "layers"):
            return cls._described(name_of(thing), thing.get_config())
        return super().describe(thing)

    @classmethod
    def _described(cls, name: str, config: dict[str, Any]) -> str:
        plain = [f"{k}={v!r}" for k, v in config.items() if k != "name" and isinstance(v, bool | int | float | str)]
        return f"{name}({', '.join(plain)})"[:SHORT]

    def of_framework(self, thing: Any) -> Parts | None:
        """Return the texts of an object of Keras's; None for any other object."""
        if isinstance(thing, PortableModel):
            sums = [zlib.crc32(np.ascontiguousarray(array).tobytes()) for array in thing.weights or ()]
            parts = [self.named("objects", thing.form.objects), Parts("", "", repr(sums))]
            return self.joined("model", [Parts(thing.form.config or ""), *parts])
        if isinstance(thing, Portable):
            parts = [self.parts(thing.kind), Parts(_text(thing.config)), self.named("objects", thing.objects)]
            return self.joined("portable", parts)
        if _has_config(thing) and hasattr(thing, "weights"):
            sums = [zlib.crc32(np.ascontiguousarray(as_array(variable)).tobytes()) for variable in thing.weights]
            return self.joined("layers", [self.parts(type(thing)), Parts("", "", repr(sums))])
        if _has_config(thing):
            return self.joined("object", [self.parts(type(thing)), Parts(_text(thing.get_config()))])
        return None


def _has_config(thing: Any) -> bool:
    return hasattr(type(thing), "get_config")  # its class is asked: Keras's lazy modules import what they are asked for


def _text(config: dict[str, Any]) -> str:
    return json.dumps(
        {k: v for k, v in config.items() if k != "name"}, default=lambda value: name_of(value), sort_keys=True
    )
