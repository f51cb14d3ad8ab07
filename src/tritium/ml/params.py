"""Spark ML Params from a dataclass: name, documentation, default, getter and setter of each field (driver)."""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import pickle
from collections.abc import Callable
from typing import Any, TypeVar

from pyspark.ml.param import Param, Params
from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReader, MLWriter
from pyspark.sql import functions

from tritium import ship
from tritium.errors import BadSetting, UntrustedModel
from tritium.model.trust import remember_saved, was_saved_here

C = TypeVar("C", bound=type)
_PICKLED = "pickledParams"


def with_params(*sources: type) -> Callable[[C], C]:
    """Return a class decorator that makes every field of these dataclasses a Param of the same name.

    `batch_size` gets `getBatchSize()` and `setBatchSize(value)`, as in Spark ML. Values are kept as they are, and
    checked by the dataclass itself.
    """

    def decorate(cls: C) -> C:
        for source in sources:
            for field in dataclasses.fields(source):
                param: Param[Any] = Param(Params._dummy(), field.name, field.metadata["doc"], _as_held)
                setattr(cls, field.name, param)
                camel = "".join(part.capitalize() for part in field.name.split("_"))
                setattr(cls, f"get{camel}", _getter(field.name, f"get{camel}"))
                setattr(cls, f"set{camel}", _setter(field.name, f"set{camel}"))
        return cls

    return decorate


def _as_held(value: Any) -> Any:
    """Return the value, or a list for a tuple, which neither Spark's `explainParams` can print nor JSON keep."""
    return list(value) if type(value) is tuple else value


def _getter(name: str, method: str) -> Callable[[Params], Any]:
    def get(self: Params) -> Any:
        return self.getOrDefault(name)

    get.__name__, get.__doc__ = method, f"Return the value of `{name}`."
    return get


def _setter(name: str, method: str) -> Callable[[Params, Any], Params]:
    def set(self: Params, value: Any) -> Params:
        return self._set(**{name: value})

    set.__name__, set.__doc__ = method, f"Set `{name}`; it is checked when `fit` is called."
    return set


def set_defaults(params: Params, *sources: type) -> None:
    """Set the dataclasses' defaults as the Params' defaults."""
    for source in sources:
        for field in dataclasses.fields(source):
            if field.default_factory is not dataclasses.MISSING:
                params._setDefault(**{field.name: field.default_factory()})
            elif field.default is not dataclasses.MISSING:
                params._setDefault(**{field.name: field.default})


def values(params: Params, source: type) -> dict[str, Any]:
    """Return the fields of this dataclass that are set or have a default."""
    names = (field.name for field in dataclasses.fields(source))
    return {name: params.getOrDefault(name) for name in names if params.isDefined(name)}


def write_metadata(
    instance: Params,
    path: str,
    spark: Any,
    extra: dict[str, Any] | None = None,
    params: dict[str, Any] | None = None,
    *,
    mode: str = "error",
) -> None:
    """Write `path/metadata` as `DefaultParamsWriter.saveMetadata` of pyspark does, by the JVM alone.

    pyspark's needs a Python worker, which fails where `PYSPARK_PYTHON` is not set and another `python3` is on the path.
    """
    text = DefaultParamsWriter._get_metadata_to_save(instance, spark, extra, params)
    table = spark.range(1, numPartitions=1).select(functions.lit(text).alias("value"))
    table.write.mode(mode).text(os.path.join(path, "metadata"))


class ParamsWriter(MLWriter):
    """A writer of Spark ML's metadata layout; what JSON can't hold is pickled by value."""

    def __init__(self, instance: Params) -> None:
        super().__init__()
        self._instance = instance

    def saveImpl(self, path: str) -> None:
        """Write the Params. Called by `save`, after it has handled `overwrite`. Raises BadSetting for a DataFrame."""
        plain: dict[str, Any] = {}
        pickled: dict[str, str] = {}
        for param, value in self._instance._paramMap.items():
            if hasattr(value, "sparkSession"):
                raise BadSetting(
                    f"{param.name} is a DataFrame, which can't be saved: clear it first, and give it to fit."
                )
            if _is_json(value):
                plain[param.name] = value
            else:
                pickled[param.name] = base64.b64encode(ship.pickle(value)).decode()
        without_defaults = self._instance.copy()
        without_defaults._defaultParamMap = {}  # The dataclass has them, and JSON can't hold some.
        extra = {_PICKLED: pickled} if pickled else None
        write_metadata(without_defaults, path, self.sparkSession, extra, plain)
        remember_saved(_whole(pickled))


class ParamsReader(MLReader[Any]):
    """A reader of what ParamsWriter wrote. Pickled values are loaded only if the session trusts them, or saved them."""

    def __init__(self, cls: type) -> None:
        super().__init__()
        self._cls = cls

    def load(self, path: str) -> Any:
        """Return the instance that was saved at `path`. Raises UntrustedModel for values that are not trusted."""
        metadata = DefaultParamsReader.loadMetadata(path, self.sparkSession)
        pickled = metadata.get(_PICKLED, {})
        if pickled and not was_saved_here(_whole(pickled)) and not trusted(self.sparkSession):
            raise UntrustedModel(
                f"The estimator at {path!r} holds {', '.join(sorted(pickled))} by value: loading it runs code from "
                "there, with your rights. If you know who made it and that nobody changed it since, say so: "
                'spark.conf.set("spark.tritium.trustModels", "true").',
                path=path,
            )
        instance = self._cls()
        instance._resetUid(metadata["uid"])
        instance._set(**metadata["paramMap"])
        instance._set(**{name: pickle.loads(base64.b64decode(text)) for name, text in pickled.items()})
        return instance


def trusted(spark: Any) -> bool:
    """Return whether this session loads code by value: `spark.tritium.trustModels=true`."""
    return str(spark.conf.get("spark.tritium.trustModels", "false")).lower() == "true"


def _whole(pickled: dict[str, str]) -> bytes:
    """Return the values by name that are pickled as one text."""
    return json.dumps(pickled, sort_keys=True).encode()


def _is_json(value: Any) -> bool:
    """Return whether JSON gives back an equal value of the same type; a tuple would come back as a list."""
    try:
        again = json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError):
        return False
    return type(again) is type(value) and bool(again == value)
