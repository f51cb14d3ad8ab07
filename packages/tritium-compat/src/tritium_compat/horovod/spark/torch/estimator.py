"""`TorchEstimator` and `TorchModel` of `horovod.spark.torch` (driver)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

from tritium.errors import BadSetting
from tritium_compat.horovod.spark.common.columns import Metadata
from tritium_compat.horovod.spark.common.estimator import HorovodEstimator, HorovodModel
from tritium_compat.horovod.spark.common.params import DATA_MODULE, ESTIMATOR, MODEL, Parameter, signature, with_params
from tritium_compat.horovod.spark.common.predict import predicted
from tritium_compat.horovod.spark.common.serialization import dumps, loads

_NO_CALLBACKS = "as in Horovod: the loop of torch calls none"
TORCH = (
    Parameter("input_shapes", "the shape that each feature is brought into: [[-1, 1, 28, 28]]"),
    Parameter("loss_constructors", "functions that make the losses, in place of loss"),
    Parameter("train_minibatch_fn", "computes the gradients of a batch, in place of the loop's own"),
)
CALLBACKS = Parameter("callbacks", "callbacks", (), unneeded=_NO_CALLBACKS)
MODEL_OF_TORCH = (Parameter("optimizer", "the optimizer with its state"), *TORCH[:2], Parameter("loss", "the loss"))


@with_params(DATA_MODULE, CALLBACKS, *TORCH)
class TorchEstimator(HorovodEstimator):
    """Trains a PyTorch module on a DataFrame, as `horovod.spark.torch.TorchEstimator` does."""

    kind, prefix = "horovod", "pytorch"

    def __init__(self, **given: Any) -> None:
        super().__init__()
        if given.get("loss") is not None and given.get("loss_constructors") is not None:
            raise ValueError("only one of loss_constructors and loss parameters can be specified.")
        if given.get("backward_passes_per_step", 1) <= 0:
            raise ValueError("backward_passes_per_step must be > 0")
        self._begin(given)

    def _get_optimizer(self) -> Any:
        return self._get("optimizer")

    def getOptimizer(self) -> Any:
        """Return the optimizer, bound to the parameters of the model."""
        return bound(self._get("model"), self._get("optimizer"))

    def _check(self, there: list[str]) -> None:
        super()._check(there)
        if self._get("optimizer") is None:
            raise BadSetting("optimizer is required: one that is bound to the model's parameters", setting="optimizer")
        if self._get("loss") is None and self._get("loss_constructors") is None and not self._get("train_minibatch_fn"):
            raise BadSetting("loss is required", setting="loss")
        weights, labels = self._get("loss_weights"), self._get("label_cols")
        if weights and len(weights) != len(labels):
            raise BadSetting(
                f"loss_weights needs to be a list with the same length as the label_columns: {len(weights)} and "
                f"{len(labels)}.",
                setting="loss_weights",
            )
        shapes, features = self._get("input_shapes"), self._get("feature_cols")
        if shapes is not None and len(shapes) != len(features):
            raise BadSetting(
                f"Feature column count {len(features)} must equal model inputs count {len(shapes)}",
                setting="input_shapes",
            )

    def _trainer(self) -> Any:
        from tritium_compat.horovod.spark.torch.remote import train

        return train

    def _arguments(self, run_id: str, metadata: Metadata) -> tuple[Any, ...]:
        from tritium_compat.horovod.spark.torch.modules import packed, plan_of

        module, path = self._get("model"), self._checkpoint(run_id)
        state = None if path is None else self._get("store").read(path)
        return packed(module), packed(plan_of(self._get("optimizer"), module)), state

    def _made(self, result: Any, run_id: str, metadata: Metadata) -> Any:
        from tritium_compat.horovod.spark.torch.modules import loaded

        history, content = result
        state, module, optimizer = loaded(content), copy.deepcopy(self._get("model")), self.getOptimizer()
        module.load_state_dict(state["model"])
        optimizer = bound(module, optimizer)
        optimizer.load_state_dict(state["optimizer"])
        return self.get_model_class()(
            history=history,
            model=module.eval(),
            optimizer=optimizer,
            feature_columns=self._get("feature_cols"),
            input_shapes=self._get("input_shapes"),
            label_columns=self._get("label_cols"),
            run_id=run_id,
            _metadata=metadata,
            loss=self._get("loss"),
            loss_constructors=self._get("loss_constructors"),
        )

    def get_model_class(self) -> type[TorchModel]:
        """Return the class of the models."""
        return TorchModel

    def _saved_value(self, name: str, value: Any) -> str:
        return saved_value(name, value)

    @classmethod
    def _loaded_value(cls, name: str, text: str, load: Callable[[str], Any]) -> Any:
        return loaded_value(name, text)


TorchEstimator.__init__.__signature__ = signature(*ESTIMATOR, DATA_MODULE, *TORCH)  # type: ignore[attr-defined]


@with_params(*MODEL_OF_TORCH)
class TorchModel(HorovodModel):
    """A trained PyTorch module. `getModel()` returns it, `getOptimizer()` the optimizer with its state."""

    def __init__(self, **given: Any) -> None:
        super().__init__()
        if given.get("label_columns"):
            self.setOutputCols([f"{name}__output" for name in given["label_columns"]])
        self._begin(given)

    def _get_optimizer(self) -> Any:
        return self._get("optimizer")

    def getOptimizer(self) -> Any:
        """Return the optimizer with its state, bound to the parameters of the model."""
        return bound(self._get("model"), self._get("optimizer"))

    def get_optimizer(self) -> Any:
        """Return the optimizer with its state, bound to the parameters of the model."""
        return self.getOptimizer()

    def _transform(self, dataset: Any) -> Any:
        from tritium_compat.horovod.spark.torch.modules import model_of

        names, labels, shapes = self._get("feature_columns"), self._get("label_columns"), self._get("input_shapes")
        sizes = {}
        for number, name in enumerate(names):
            scalar = dataset.schema[name].dataType.typeName() not in ("array", "vectorudt", "udt")
            sizes[name] = None if scalar else width(dataset, name, None if shapes is None else shapes[number])
        model = model_of(self._get("model"), names, sizes, shapes, len(labels))
        return predicted(model, dataset, labels, self.getOutputCols(), self._get_metadata())

    def _saved_value(self, name: str, value: Any) -> str:
        return saved_value(name, value)

    @classmethod
    def _loaded_value(cls, name: str, text: str, load: Callable[[str], Any]) -> Any:
        return loaded_value(name, text)


TorchModel.__init__.__signature__ = signature(*MODEL, *MODEL_OF_TORCH)  # type: ignore[attr-defined]


def bound(module: Any, optimizer: Any) -> Any:
    """Return the optimizer, with its state, for the parameters of the module."""
    from tritium_compat.horovod.spark.torch.modules import optimizer_for

    if module is None or optimizer is None:
        return optimizer
    state, names = optimizer.state_dict(), [name for name, _ in module.named_parameters()]
    sizes = [len(group["params"]) for group in state["param_groups"]]
    groups, at = [], 0
    for size in sizes:
        groups.append(names[at : at + size])
        at += size
    return optimizer_for(module, type(optimizer), groups if at == len(names) else None, state)


def width(dataset: Any, name: str, shape: Any) -> int:
    """Return the numbers in a row of a vector column: by `input_shapes`, else by the first row."""
    if shape is not None:
        return abs(math.prod(int(part) for part in shape))
    row = dataset.select(name).head()
    if row is None:
        raise BadSetting(f"input_shapes is needed: the DataFrame has no row to see the length of {name!r} by.")
    return len(row[0])


def saved_value(name: str, value: Any) -> str:
    """Return a parameter as text: a ScriptModule as torch saves it, anything else pickled."""
    import io

    import torch

    if name == "model" and isinstance(value, torch.jit.ScriptModule):
        file = io.BytesIO()
        torch.jit.save(value, file)
        value = file
    return dumps(value)


def loaded_value(name: str, text: str) -> Any:
    """Return a parameter from its text."""
    import io

    import torch

    found = loads(text)
    if name == "model" and isinstance(found, io.BytesIO):
        found.seek(0)
        load: Any = torch.jit.load
        return load(found)
    return found
