"""`KerasEstimator` and `KerasModel` of `horovod.spark.keras` (driver)."""

from __future__ import annotations

import posixpath
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tritium.errors import BadSetting, ModelError
from tritium_compat.horovod.spark.common.columns import Metadata
from tritium_compat.horovod.spark.common.estimator import HorovodEstimator, HorovodModel
from tritium_compat.horovod.spark.common.params import (
    DATA_MODULE,
    ESTIMATOR,
    MODEL,
    ONE_PASS,
    UNCOMPRESSED,
    Parameter,
    signature,
    with_params,
)
from tritium_compat.horovod.spark.common.predict import predicted
from tritium_compat.horovod.spark.common.serialization import dumps, loads

_OBJECTS = Parameter("custom_objects", "the user's classes and functions, by name")
KERAS = (
    _OBJECTS,
    Parameter("checkpoint_callback", "a ModelCheckpoint, by which the model is chosen that fit returns"),
    Parameter("backend_env", "variables of the ranks' environment"),
)
MODEL_OF_KERAS = (_OBJECTS, Parameter("_floatx", "Keras's default float type"))


@with_params(DATA_MODULE, UNCOMPRESSED, ONE_PASS, *KERAS)
class KerasEstimator(HorovodEstimator):
    """Trains a Keras model on a DataFrame, as `horovod.spark.keras.KerasEstimator` does."""

    kind, prefix = "keras", "keras"

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self._begin(given)

    def get_model_shapes(self) -> tuple[list[list[int]], list[list[int]]]:
        """Return the shapes of the model's inputs and outputs."""
        from tritium_compat.horovod.spark.keras.models import shape_of

        model = self._get("model")
        return [shape_of(one) for one in model.inputs], [shape_of(one) for one in model.outputs]

    def _check(self, there: list[str]) -> None:
        super()._check(there)
        import keras

        model = self._get("model")
        if not isinstance(model, keras.Model):
            raise BadSetting(
                f"model has to be an instance of keras.Model (tf.keras with TensorFlow's Keras 3), not "
                f"{type(model).__module__}.{type(model).__name__}. TF_USE_LEGACY_KERAS must not be set.",
                setting="model",
            )
        if not self._get("loss") and not getattr(model, "compiled", False):
            raise BadSetting("Loss parameter is required for the model to compile", setting="loss")
        if self._get("optimizer") is None and getattr(model, "optimizer", None) is None:
            raise BadSetting(
                "Optimizer must be provided either as a parameter or as part of a compiled model", setting="optimizer"
            )
        inputs, outputs = self.get_model_shapes()
        for what, columns, shapes in (
            ("Feature column count {} must equal model inputs count {}", self._get("feature_cols"), inputs),
            ("Label column count {} must equal model outputs count {}", self._get("label_cols"), outputs),
        ):
            if len(columns) != len(shapes):
                raise BadSetting(what.format(len(columns), len(shapes)), setting="feature_cols")

    def _trainer(self) -> Any:
        from tritium_compat.horovod.spark.keras.remote import train

        return train

    def _environment(self) -> dict[str, str]:
        import keras

        return {"KERAS_BACKEND": keras.backend.backend(), **(self._get("backend_env") or {})}

    def _sent(self, name: str) -> Any:
        from tritium.integration.keras import without_model

        value = self._get(name)
        if name == "callbacks":
            return [without_model(callback) for callback in value]
        if name == "checkpoint_callback" and value is not None:
            return without_model(value)
        return {} if name == "custom_objects" and value is None else value if name not in ("loss", "metrics") else None

    def _arguments(self, run_id: str, metadata: Metadata) -> tuple[Any, ...]:
        import keras

        from tritium.integration.keras import PortableModel, compile_arguments, packed

        model, objects = self._get("model"), self._get("custom_objects") or {}
        resumed, optimizer = self._resumed(run_id), self._get("optimizer")
        if resumed is not None:
            model = resumed
            optimizer = resumed.optimizer
        given = {name: self._get(name) for name in ("loss", "loss_weights", "metrics")}
        given = {name: packed(value) for name, value in given.items() if value}
        own = {name: packed(value) for name, value in compile_arguments(model).items() if value is not None}
        optimizer = model.optimizer if optimizer is None else keras.optimizers.get(optimizer)
        state = [keras.ops.convert_to_numpy(one) for one in optimizer.variables] if optimizer.built else []
        arguments = {**own, **given, "optimizer": packed(optimizer)}
        return PortableModel.of(model, objects), arguments, state, resumed is not None

    def _checkpoint_name(self) -> str:
        from tritium_compat.horovod.spark.keras.remote import file_name

        return file_name(self._get("store").get_checkpoint_filename(), self._get("checkpoint_callback"))

    def _resumed(self, run_id: str) -> Any:
        """Return the model of the run's checkpoint; None where there is none."""
        import keras

        path = self._checkpoint(run_id)
        if path is None:
            return None
        with tempfile.TemporaryDirectory() as directory:
            local = Path(directory) / posixpath.basename(path)
            local.write_bytes(self._get("store").read(path))
            if path.endswith(".weights.h5"):
                model = keras.models.clone_model(self._get("model"))
                model.load_weights(local)
                model.optimizer = keras.optimizers.get(self._get("optimizer"))
                return model
            try:
                return keras.saving.load_model(local, custom_objects=self._get("custom_objects") or {}, safe_mode=False)
            except (TypeError, ValueError) as error:
                raise ModelError(
                    f"The checkpoint {path} of run_id={run_id!r} can't be read: {error} Give what is missing in "
                    "custom_objects, or another run_id to begin anew.",
                    path=path,
                ) from error

    def _made(self, result: Any, run_id: str, metadata: Metadata) -> Any:
        import keras

        from tritium.integration.keras import put_weights
        from tritium_compat.horovod.spark.keras.models import compiled, learning_rate, put_state

        history, weights, state, size = result
        portable, arguments, _, _ = self._arguments(f"{run_id} (none)", metadata)
        objects = self._get("custom_objects") or {}
        model = compiled(portable.model(), arguments, objects)
        put_weights(model.weights, weights)
        put_state(model.optimizer, model, state)
        rate = learning_rate(model.optimizer)
        if rate is not None:
            model.optimizer.learning_rate = rate / size
        return self.get_model_class()(
            history=history,
            model=model,
            feature_columns=self._get("feature_cols"),
            label_columns=self._get("label_cols"),
            custom_objects=objects,
            run_id=run_id,
            _metadata=metadata,
            _floatx=keras.backend.floatx(),
        )

    def get_model_class(self) -> type[KerasModel]:
        """Return the class of the models."""
        return KerasModel

    def _saved_value(self, name: str, value: Any) -> str:
        return saved_value(name, value, self._get("custom_objects") or {})

    @classmethod
    def _loaded_value(cls, name: str, text: str, load: Callable[[str], Any]) -> Any:
        return loaded_value(name, text, load)


KerasEstimator.__init__.__signature__ = signature(*ESTIMATOR, DATA_MODULE, *KERAS)  # type: ignore[attr-defined]


@with_params(*MODEL_OF_KERAS)
class KerasModel(HorovodModel):
    """A trained Keras model, which `getModel()` returns."""

    def __init__(self, **given: Any) -> None:
        super().__init__()
        if given.get("label_columns"):
            self.setOutputCols([f"{name}__output" for name in given["label_columns"]])
        self._begin(given)

    def _transform(self, dataset: Any) -> Any:
        import math

        from tritium_compat.horovod.spark.keras.models import model_of, shape_of

        model, names, labels = self._get("model"), self._get("feature_columns"), self._get("label_columns")
        sizes = [
            abs(math.prod(shape_of(tensor)))
            if dataset.schema[name].dataType.typeName() in ("array", "vectorudt", "udt")
            else None
            for name, tensor in zip(names, model.inputs, strict=True)
        ]
        scoring = model_of(model, names, sizes, len(labels), self._get("custom_objects") or {})
        return predicted(scoring, dataset, labels, self.getOutputCols(), self._get_metadata())

    def _saved_value(self, name: str, value: Any) -> str:
        return saved_value(name, value, self._get("custom_objects") or {})

    @classmethod
    def _loaded_value(cls, name: str, text: str, load: Callable[[str], Any]) -> Any:
        return loaded_value(name, text, load)


KerasModel.__init__.__signature__ = signature(*MODEL, *MODEL_OF_KERAS)  # type: ignore[attr-defined]


def saved_value(name: str, value: Any, objects: dict[str, Any]) -> str:
    """Return a parameter as text: Keras's objects without variables, anything else pickled."""
    from tritium_compat.horovod.spark.keras.models import as_parts, packed

    if name == "model":
        value = as_parts(value, objects)
    elif name in ("optimizer", "metrics", "loss"):
        value = packed(value)
    return dumps(value)


def loaded_value(name: str, text: str, load: Callable[[str], Any]) -> Any:
    """Return a parameter from its text; a model of real Horovod from the HDF5 file that it is."""
    from tritium_compat.horovod.spark.keras.models import of_parts, unpacked

    found = loads(text)
    if name == "model":
        objects = load("custom_objects")
        known = {} if objects is None else loads(objects)
        return _of_hdf5(found, known) if isinstance(found, bytes) else of_parts(found, known)
    return unpacked(found) if name in ("optimizer", "metrics", "loss") else found


def _of_hdf5(content: bytes, objects: dict[str, Any]) -> Any:
    import keras

    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "model.h5"
        file.write_bytes(content)
        return keras.models.load_model(file, custom_objects=objects, compile=False)
