"""petastorm's Spark converter in TorchDistributor's processes (pyspark 3.5).

In its favour: its BatchedDataLoader (the default one takes rows apart), one reader thread beside the rank's own.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import work

STORE = "petastorm.spark.converter.parentCacheDirUrl"


def from_converter(converter: Any, epochs: int) -> tuple[Any, float, int]:
    import os

    import torch
    from petastorm.pytorch import BatchedDataLoader

    steps = len(converter) // (work.RANKS * work.BATCH)
    shard = {"cur_shard": int(os.environ["RANK"]), "shard_count": work.RANKS}
    settings = {
        "batch_size": work.BATCH,
        "num_epochs": None,
        "shuffling_queue_capacity": 20 * work.BATCH,
        "workers_count": 1,
        "data_loader_fn": BatchedDataLoader,
    }
    with converter.make_torch_dataloader(**settings, **shard) as loader:
        taken = iter(loader)

        def batches(_: int) -> Iterator[tuple[Any, Any]]:
            for _ in range(steps):
                batch = next(taken)
                yield torch.stack([batch[name] for name in work.FEATURES], dim=1), batch[work.LABEL]

        return work.train(epochs, batches)


def fit(frame: Any, epochs: int) -> work.Fitted:
    from petastorm.spark import make_spark_converter
    from pyspark.ml.torch.distributor import TorchDistributor

    with tempfile.TemporaryDirectory(prefix="rows-") as folder:
        frame.sparkSession.conf.set(STORE, f"file://{folder}")
        began = time.perf_counter()
        converter = make_spark_converter(frame)
        materialise = time.perf_counter() - began
        distributor = TorchDistributor(num_processes=work.RANKS, local_mode=False, use_gpu=False)
        layers, loop, rows = distributor.run(from_converter, converter, epochs)
        converter.delete()
    return work.Fitted(layers, loop, rows * work.RANKS, {"materialise": materialise})


if __name__ == "__main__":
    sys.exit(work.main(fit, "petastorm", "torch", "pyarrow"))
