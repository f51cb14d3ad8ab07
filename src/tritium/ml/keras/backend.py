"""`KerasBackend`: Keras as the backend of an estimator (driver, rank)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tritium import file_system
from tritium.data.schema import Field
from tritium.ml.backend import Backend
from tritium.ml.keras import training
from tritium.ml.keras.dry_run import KerasDryRun, drawing
from tritium.ml.keras.identity import identity_with_code, opened
from tritium.ml.keras.portable import PortableModel
from tritium.ml.keras.settings import KerasSettings, is_keras_model
from tritium.model.engines.keras_form import Form, built, remember
from tritium.model.engines.keras_weights import put, read
from tritium.model.model import Model
from tritium.model.signature import Signature


class KerasBackend(Backend[KerasSettings]):
    """The backend that trains a `keras.Model` by its `fit`."""

    opened = staticmethod(opened)
    train = staticmethod(training.train)

    def dry_run(
        self, settings: KerasSettings, fields: Mapping[str, Field], shapes: Mapping[str, tuple[int, ...]]
    ) -> KerasDryRun:
        """Call the model with zeros."""
        return KerasDryRun(settings, fields, shapes)

    def identity(self, settings: KerasSettings, fields: Sequence[Field]) -> dict[str, Any]:
        """Return the identity, taken of a new compiled model."""
        with drawing(settings.seed):
            return identity_with_code(settings, settings.compiled(settings.make_model()), fields)

    def restore(
        self, settings: KerasSettings, run_dir: str, signature: Signature, history: list[dict[str, Any]]
    ) -> Model:
        """Return a new model with the weights of rank 0 as a Model."""
        inputs = {i.name: (i.dtype, tuple(n or 1 for n in i.shape)) for i in signature.inputs}
        with drawing(settings.seed):
            module = built(settings.make_model(), inputs)
        arrays = read(file_system.read(f"{run_dir}/{training.WEIGHTS}"))
        put(module.weights, list(arrays.values()), list(arrays))
        objects, make = dict(settings.custom_objects or {}), None
        if is_keras_model(settings.model):
            objects |= PortableModel.of(settings.model, objects).form.objects
        else:
            make = settings.maker
        remember(
            module,
            Form(None, objects, False, None, inputs) if _has_config(module) else Form(None, {}, False, make, inputs),
        )
        return Model(module, signature, history=history, engine="keras")


def _has_config(module: Any) -> bool:
    """Return whether a model can be made again from its configuration; by its class, Keras's own can."""
    import keras

    if type(module) in (keras.Sequential, keras.Model) or type(module).__module__.startswith("keras."):
        return True
    return "get_config" in vars(type(module))
