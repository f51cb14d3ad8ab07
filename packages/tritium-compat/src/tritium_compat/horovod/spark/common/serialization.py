"""Writes and reads estimators and models as `horovod.spark` does: Spark ML's metadata, values pickled (driver)."""

from __future__ import annotations

import base64
import importlib
import json
import pickle
import time
from collections.abc import Callable
from typing import Any

from pyspark.ml.util import DefaultParamsReader, MLReadable, MLReader, MLWritable, MLWriter

import tritium.compat  # noqa: F401 (what real Horovod has written names its modules)
from tritium.errors import ModelError
from tritium.integration import pickle_by_value

_LEFT_OUT = ("backend", "store")


def dumps(value: Any) -> str:
    """Return a value as base64 of its pickle."""
    return base64.b64encode(pickle_by_value(value)).decode("ascii")


def loads(text: str) -> Any:
    """Return the value of `dumps`."""
    return pickle.loads(base64.b64decode(text))


class Saved(MLReadable[Any], MLWritable):
    """An estimator or a model that can be saved and loaded. Loading runs code from the files, as in Horovod."""

    def write(self) -> MLWriter:
        """Return a writer."""
        return _Writer(self)

    @classmethod
    def read(cls) -> MLReader[Any]:
        """Return a reader."""
        return _Reader(cls)

    def _saved_value(self, name: str, value: Any) -> str:
        return dumps(value)

    @classmethod
    def _loaded_value(cls, name: str, text: str, load: Callable[[str], Any]) -> Any:
        """Return a value. `load` gives another parameter that was saved beside it."""
        return loads(text)


class _Writer(MLWriter):
    def __init__(self, instance: Any) -> None:
        super().__init__()
        self._instance = instance

    def saveImpl(self, path: str) -> None:
        """Write the metadata. Called by `save`, after it has handled `overwrite`."""
        instance = self._instance

        def saved(params: dict[Any, Any]) -> dict[str, Any]:
            kept = {p.name: value for p, value in params.items()}
            return {
                name: None if value is None or name in _LEFT_OUT else instance._saved_value(name, value)
                for name, value in kept.items()
            }

        whole = type(instance).__module__.replace("tritium_compat.", "", 1)
        metadata = {
            "class": f"{whole}.{type(instance).__name__}",
            "timestamp": int(time.time() * 1000),
            "sparkVersion": self.sparkSession.version,
            "uid": instance.uid,
            "paramMap": saved(instance._paramMap),
            "defaultParamMap": saved(instance._defaultParamMap),
        }
        text = json.dumps(metadata, separators=(",", ":"))
        self.sparkSession.createDataFrame([(text,)], ["value"]).coalesce(1).write.text(f"{path}/metadata")


class _Reader(MLReader[Any]):
    def __init__(self, cls: type) -> None:
        super().__init__()
        self._cls = cls

    def load(self, path: str) -> Any:
        """Return the instance that was saved at `path`, by Tritium or by real Horovod. Raises ModelError."""
        metadata = DefaultParamsReader.loadMetadata(path, self.sparkSession)
        home, _, name = metadata["class"].rpartition(".")
        try:
            found = getattr(importlib.import_module(home), name)
        except (ImportError, AttributeError) as error:
            raise ModelError(f"{path!r} holds a {metadata['class']}, which can't be imported: {error}") from error
        instance = found()
        instance._resetUid(metadata["uid"])
        unread = {}
        for kind, put in (("defaultParamMap", instance._setDefault), ("paramMap", instance._set)):
            given = metadata[kind]
            for key, text in given.items():
                if not instance.hasParam(key):
                    continue
                try:
                    value = None if text is None else found._loaded_value(key, text, given.get)
                except Exception as error:  # noqa: BLE001 (the code of pickled objects)
                    unread[key] = f"{type(error).__name__}: {error}"
                    continue
                if value is not None or kind == "defaultParamMap":
                    put(**{key: value})
        if "model" in unread or (unread and "model" not in metadata["paramMap"]):
            listed = "; ".join(f"{name}: {why:.300}" for name, why in unread.items())
            raise ModelError(
                f"{path!r} was saved with other versions of its libraries, and can't be read here: {listed}. Load it "
                "with those versions, save the weights alone (model.getModel().state_dict(), or save_weights), and "
                "make a model here with them.",
                path=path,
                unread=unread,
            )
        if unread:
            import warnings

            from tritium.errors import TritiumWarning

            warnings.warn(
                f"{path!r}: {', '.join(unread)} can't be read here, and is left out "
                f"({next(iter(unread.values())):.200}).",
                TritiumWarning,
                stacklevel=3,
            )
        return instance
