"""Ray Train's TorchTrainer, which forms the group itself; `ray.init` is not timed."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import launching
import work


def launch(function: Callable[[], int]) -> Any:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    scaling = ScalingConfig(num_workers=work.RANKS, resources_per_worker={"CPU": 0.5})
    with tempfile.TemporaryDirectory(prefix="run-") as folder:

        def loop() -> None:
            Path(folder, "said").write_text(str(function()))

        settings = {"scaling_config": scaling, "run_config": RunConfig(storage_path=folder)}
        if function is launching.group:
            TorchTrainer(loop, torch_config=TorchConfig(backend="gloo"), **settings).fit()
        else:
            DataParallelTrainer(loop, **settings).fit()
        return int(Path(folder, "said").read_text())


if __name__ == "__main__":
    work.init_ray()
    sys.exit(launching.main(launch, "ray", "torch"))
