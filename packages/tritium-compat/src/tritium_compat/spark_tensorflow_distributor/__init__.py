"""`spark_tensorflow_distributor`: `MirroredStrategyRunner` (driver)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tritium.errors import BadSetting
from tritium_compat import jobs


class MirroredStrategyRunner:
    """Runs a function in the scope of TensorFlow's MultiWorkerMirroredStrategy, in each rank of a gang."""

    def __init__(
        self,
        *,
        num_slots: int,
        local_mode: bool = False,
        use_gpu: bool = True,
        gpu_resource_name: str = "gpu",
        use_custom_strategy: bool = False,
    ) -> None:
        """Set how many ranks there are, each with a GPU or a Spark slot.

        local_mode : on the driver.
        use_gpu : one GPU a rank.
        gpu_resource_name : only "gpu", Spark's usual name.
        use_custom_strategy : the function makes its own strategy.
        """
        if isinstance(num_slots, bool) or not isinstance(num_slots, int) or num_slots < 1:
            raise BadSetting(f"num_slots={num_slots!r} must be a whole number of at least 1.", setting="num_slots")
        if gpu_resource_name != "gpu":
            raise BadSetting(
                f'gpu_resource_name={gpu_resource_name!r}: Tritium asks Spark for GPUs by the name "gpu". Configure '
                "spark.executor.resource.gpu.amount.",
                setting="gpu_resource_name",
            )
        self._slots, self._local, self._gpus = num_slots, local_mode, int(use_gpu)
        self._custom = use_custom_strategy

    def run(self, train_fn: Callable[..., Any], **kwargs: Any) -> Any:
        """Call `train_fn(**kwargs)` in every rank, and return the result of the chief, rank 0."""
        settings: dict[str, Any] = {"local": self._local, "gpus": self._gpus, "framework": "tensorflow"}
        if self._custom:
            return jobs.run(train_fn, self._slots, kwargs=kwargs, **settings)[0]
        return jobs.run(in_scope, self._slots, args=(train_fn, kwargs), **settings)[0]


def in_scope(train_fn: Callable[..., Any], kwargs: Mapping[str, Any]) -> Any:
    """Call the function in the scope of a strategy over all ranks (rank)."""
    import tensorflow

    with tensorflow.distribute.MultiWorkerMirroredStrategy().scope():
        return train_fn(**kwargs)


__all__ = ["MirroredStrategyRunner"]
