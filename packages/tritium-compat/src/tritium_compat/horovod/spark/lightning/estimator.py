"""`TorchEstimator` and `TorchModel` of `horovod.spark.lightning` (driver)."""

from __future__ import annotations

import copy
from typing import Any

from tritium.errors import BadSetting
from tritium_compat.horovod.spark.common.columns import Metadata
from tritium_compat.horovod.spark.common.estimator import HorovodEstimator
from tritium_compat.horovod.spark.common.params import (
    DATA_MODULE,
    ESTIMATOR,
    FEEDING,
    ONE_PASS,
    UNCOMPRESSED,
    Parameter,
    signature,
    with_params,
)
from tritium_compat.horovod.spark.torch.estimator import TORCH, bound, loaded_value, saved_value
from tritium_compat.horovod.spark.torch.estimator import TorchModel as ModelOfTorch

MIN_PL_VERSION = "1.3.8"
_LOADER = "there is no loader of its own in between"
LIGHTNING = (
    TORCH[0],
    Parameter("loss_constructors", "functions that make the losses", unneeded="as in Horovod. Give loss="),
    Parameter("metrics", "the metrics", (), unneeded="as in Horovod. A LightningModule logs them with self.log"),
    Parameter(
        "train_minibatch_fn",
        "computes the gradients of a batch",
        refused="Lightning's Trainer runs the loop: write a training_step.",
    ),
    Parameter("num_gpus", "GPUs of a rank", accessor="NumGPUs"),
    Parameter("logger", "a logger of Lightning's"),
    Parameter("log_every_n_steps", "how often values are logged", 50, int, "LogEveryNSteps"),
    Parameter("loader_num_epochs", "passes of the reader", unneeded=FEEDING),
    Parameter("terminate_on_nan", "whether a loss that is NaN ends the training", False, bool),
    Parameter("profiler", "a profiler of Lightning's"),
    Parameter("trainer_args", "arguments of the Trainer"),
    Parameter("debug_data_loader", "shows what the loader does", False, unneeded=_LOADER),
    Parameter(
        "train_async_data_loader_queue_size",
        "batches ahead",
        accessor="TrainAsyncDataLoaderQueueSize",
        unneeded=_LOADER,
    ),
    Parameter(
        "val_async_data_loader_queue_size", "batches ahead", accessor="ValAsyncDataLoaderQueueSize", unneeded=_LOADER
    ),
)


@with_params(DATA_MODULE, UNCOMPRESSED, ONE_PASS, *LIGHTNING)
class TorchEstimator(HorovodEstimator):
    """Trains a LightningModule on a DataFrame, as `horovod.spark.lightning.TorchEstimator` does."""

    kind, prefix = "lightning", "pytorch"

    def __init__(self, **given: Any) -> None:
        super().__init__()
        if given.get("loss") is not None and given.get("loss_constructors") is not None:
            raise ValueError("only one of loss_constructors and loss parameters can be specified.")
        self._begin(given)

    def getOptimizer(self) -> Any:
        """Return the optimizer, bound to the parameters of the model."""
        return bound(self._get("model"), self._get("optimizer"))

    def _get_optimizer(self) -> Any:
        return self._get("optimizer")

    def _check(self, there: list[str]) -> None:
        super()._check(there)
        from tritium_compat.horovod.spark.lightning.remote import package_of

        given = {name: self._get(name) for name in ("optimizer", "loss", "loss_weights")}
        if package_of(self._get("model")) is not None:
            for name, value in given.items():
                if value:
                    where = "configure_optimizers" if name == "optimizer" else "training_step"
                    raise BadSetting(
                        f"Parameter `{name}` cannot be specified with a `LightningModule`. Implement "
                        f"`LightningModule.{where}` instead.",
                        setting=name,
                    )
        elif not given["optimizer"] or not given["loss"]:
            raise BadSetting("A model that is no LightningModule needs optimizer= and loss=.", setting="optimizer")

    def _trainer(self) -> Any:
        from tritium_compat.horovod.spark.lightning.remote import train

        return train

    def _checkpoint_name(self) -> str:
        return f"{super()._checkpoint_name()}.ckpt"

    def _arguments(self, run_id: str, metadata: Metadata) -> tuple[Any, ...]:
        from tritium_compat.horovod.spark.torch.modules import packed, plan_of

        module, path = self._get("model"), self._checkpoint(run_id)
        optimizer = self._get("optimizer")
        plan = None if optimizer is None else packed(plan_of(optimizer, module))
        return packed(module), plan, None if path is None else self._get("store").read(path)

    def _made(self, result: Any, run_id: str, metadata: Metadata) -> Any:
        from tritium_compat.horovod.spark.torch.modules import loaded

        history, content = result
        module = copy.deepcopy(self._get("model"))
        module.load_state_dict(loaded(content)["model"])
        return self.get_model_class()(
            history=history,
            model=module.eval(),
            optimizer=self._get("optimizer"),
            feature_columns=self._get("feature_cols"),
            input_shapes=self._get("input_shapes"),
            label_columns=self._get("label_cols"),
            run_id=run_id,
            _metadata=metadata,
            loss=self._get("loss"),
        )

    def get_model_class(self) -> type[TorchModel]:
        """Return the class of the models."""
        return TorchModel

    def _saved_value(self, name: str, value: Any) -> str:
        return saved_value(name, value)

    @classmethod
    def _loaded_value(cls, name: str, text: str, load: Any) -> Any:
        return loaded_value(name, text)


TorchEstimator.__init__.__signature__ = signature(*ESTIMATOR, DATA_MODULE, *LIGHTNING)  # type: ignore[attr-defined]


class TorchModel(ModelOfTorch):
    """A trained module. `getModel()` returns it, `getHistory()` what was logged last."""
