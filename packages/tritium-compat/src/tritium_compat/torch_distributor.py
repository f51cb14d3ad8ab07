"""`TorchDistributor`, with the arguments of `pyspark.ml.torch.distributor` (driver)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tritium.errors import BadSetting
from tritium_compat import jobs


class TorchDistributor:
    """Runs a function or a script that uses `torch.distributed`, in the ranks of a gang."""

    def __init__(self, num_processes: int = 1, local_mode: bool = True, use_gpu: bool = True, **more: Any) -> None:
        """Set how many ranks there are, on this machine or on the cluster, and whether each has a GPU.

        Also by pyspark's other spelling: numProcesses, localMode, useGpu.
        """
        given = {"num_processes": num_processes, "local_mode": local_mode, "use_gpu": use_gpu}
        spelled = {"numProcesses": "num_processes", "localMode": "local_mode", "useGpu": "use_gpu"}
        for name, value in more.items():
            if name == "_ssl_conf":
                continue
            if name not in spelled:
                raise TypeError(f"{type(self).__name__}() got an unexpected keyword argument {name!r}")
            given[spelled[name]] = value
        count = given["num_processes"]
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise BadSetting(f"num_processes={count!r} must be a whole number of at least 1.", setting="num_processes")
        self.num_processes, self.local_mode, self.use_gpu = count, bool(given["local_mode"]), bool(given["use_gpu"])

    def run(self, train_object: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Any:
        """Call a function with the arguments, or run a script with them, in every rank; return what rank 0 returns."""
        settings: dict[str, Any] = {"local": self.local_mode, "gpus": int(self.use_gpu), "framework": "torch"}
        if isinstance(train_object, str):
            if kwargs:
                raise BadSetting(
                    f"run({train_object!r}, {next(iter(kwargs))}=…): a script takes no keyword arguments. Give them "
                    "in the order of its command line."
                )
            args = tuple(map(str, args))
        return jobs.run(train_object, self.num_processes, args=args, kwargs=kwargs or None, **settings)[0]
