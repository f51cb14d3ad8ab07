"""`DeepspeedTorchDistributor`, with the arguments of `pyspark.ml.deepspeed` (driver)."""

from __future__ import annotations

import importlib.util
import json
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tritium.errors import BadSetting, TritiumError
from tritium.integration import Program
from tritium_compat import jobs


class DeepspeedTorchDistributor:
    """Runs a function or a script that uses DeepSpeed, in the ranks of a gang."""

    def __init__(
        self,
        numGpus: int = 1,
        nnodes: int = 1,
        localMode: bool = True,
        useGpu: bool = True,
        deepspeedConfig: str | Mapping[str, Any] | None = None,
    ) -> None:
        """Set how many ranks there are: `numGpus` times `nnodes`, on this machine or on the cluster.

        deepspeedConfig : a dict, or the path of a JSON file here; a script gets it as `--deepspeed_config FILE`.
        """
        for name, value in (("numGpus", numGpus), ("nnodes", nnodes)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise BadSetting(f"{name}={value!r} must be a whole number of at least 1.", setting=name)
        if localMode and nnodes != 1:
            raise BadSetting(f"localMode=True runs on this machine alone, and nnodes={nnodes}.", setting="nnodes")
        self.num_processes, self.local_mode, self.use_gpu = numGpus * nnodes, bool(localMode), bool(useGpu)
        self.deepspeed_config = deepspeedConfig

    def run(self, train_object: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Any:
        """Call a function with the arguments, or run a script with them, in every rank; return what rank 0 returns.

        A script also gets `--deepspeed`, and `--deepspeed_config FILE` where a configuration was given. Raises
        TritiumError where DeepSpeed is not installed.
        """
        settings: dict[str, Any] = {"local": self.local_mode, "gpus": int(self.use_gpu), "framework": "torch"}
        if self.local_mode:
            check_installed()
        if not isinstance(train_object, str):
            return jobs.run(with_deepspeed, self.num_processes, args=(train_object, args, kwargs), **settings)[0]
        if kwargs:
            raise BadSetting(
                f"run({train_object!r}, {next(iter(kwargs))}=…): a script takes no keyword arguments. Give them in the "
                "order of its command line."
            )
        if not Path(train_object).is_file():
            raise BadSetting(f"run({train_object!r}): there is no such script here.")
        given = (str(Path(train_object).resolve()), Path(train_object).read_bytes(), [str(arg) for arg in args])
        return jobs.run(with_config, self.num_processes, args=(*given, self._config()), **settings)[0]

    def _config(self) -> str | None:
        """Return the configuration as JSON."""
        if self.deepspeed_config is None:
            return None
        if isinstance(self.deepspeed_config, Mapping):
            return json.dumps(dict(self.deepspeed_config))
        if not Path(self.deepspeed_config).is_file():
            raise BadSetting(f"deepspeedConfig={self.deepspeed_config!r}: there is no such file here.")
        return Path(self.deepspeed_config).read_text()


def check_installed() -> None:
    """Raise TritiumError where DeepSpeed is not installed."""
    if importlib.util.find_spec("deepspeed") is None:
        raise TritiumError(
            f"DeepspeedTorchDistributor needs DeepSpeed, which is not installed on {socket.gethostname()}: "
            f"{sys.executable} -m pip install deepspeed. Without it, TorchDistributor runs torch.distributed, and "
            'TorchEstimator(strategy="fsdp") shards weights, gradients and optimizer state.'
        )


def with_deepspeed(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call the function where DeepSpeed is installed (rank)."""
    check_installed()
    return function(*args, **kwargs)


def with_config(path: str, content: bytes, args: Sequence[str], config: str | None) -> None:
    """Run a script with DeepSpeed's arguments, its configuration in a file of this machine (rank)."""
    check_installed()
    with tempfile.TemporaryDirectory(prefix="tritium-deepspeed-") as home:
        more = ["--deepspeed"]
        if config is not None:
            file = Path(home) / "deepspeed.json"
            file.write_text(config)
            more += ["--deepspeed_config", str(file)]
        Program("script", path, (*args, *more), content)()
