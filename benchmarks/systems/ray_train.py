"""Ray Data and Ray Train over Parquet that Spark has written, as Ray's guide to data ingest shows it.

`ray.init` is not timed: it takes the place of the warm session. Each worker asks for half a core, so that the tasks of
Ray Data have one as well; a worker's rows are shuffled by `local_shuffle_buffer_size`.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import work


def from_ray(config: dict[str, Any]) -> None:
    import numpy as np
    import ray.train
    import torch

    shard = ray.train.get_dataset_shard("train")
    settings = {"batch_size": work.BATCH, "drop_last": True, "local_shuffle_buffer_size": 20 * work.BATCH}

    def batches(_: int) -> Iterator[tuple[Any, Any]]:
        for batch in shard.iter_torch_batches(**settings):
            yield torch.stack([batch[name] for name in work.FEATURES], dim=1), batch[work.LABEL]

    layers, seconds, rows = work.train(config["epochs"], batches, steps=config["steps"])
    if ray.train.get_context().get_world_rank() == 0:
        np.savez(config["result"], *(part for layer in layers for part in layer), np.array([seconds, rows]))
    ray.train.report({"seconds": seconds})


def fit(frame: Any, epochs: int) -> work.Fitted:
    import numpy as np
    import ray.data
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    work.init_ray()
    with tempfile.TemporaryDirectory(prefix="ray-") as folder, work.as_parquet(frame) as (written, materialise):
        rows = ray.data.read_parquet(written)
        steps = rows.count() // work.RANKS // work.BATCH
        result = f"{folder}/result.npz"
        TorchTrainer(
            from_ray,
            train_loop_config={"epochs": epochs, "steps": steps, "result": result},
            scaling_config=ScalingConfig(num_workers=work.RANKS, resources_per_worker={"CPU": 0.5}),
            torch_config=TorchConfig(backend="gloo"),
            run_config=RunConfig(storage_path=f"{folder}/runs"),
            datasets={"train": rows},
        ).fit()
        *parts, (loop, taken) = np.load(result).values()
    return work.Fitted(work.paired(parts), float(loop), int(taken) * work.RANKS, {"materialise": materialise})


if __name__ == "__main__":
    sys.exit(work.main(fit, "ray", "torch", "pyarrow"))
