"""petastorm's Spark converter and BatchedDataLoader, decoding in a TransformSpec, in TorchDistributor's processes."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import imaging
import numpy as np
import work
from petastorm_converter import STORE


def decoded(rows: Any) -> Any:
    rows["image"] = rows["image"].map(imaging.decode)
    return rows


def take(converter: Any) -> Any:
    import os

    import torch.distributed as dist
    from petastorm import TransformSpec
    from petastorm.pytorch import BatchedDataLoader

    dist.init_process_group("gloo")
    shape = (imaging.SIZE, imaging.SIZE, 3)
    transform = TransformSpec(decoded, edit_fields=[("image", np.uint8, shape, False)])
    settings = {"batch_size": imaging.BATCH, "num_epochs": 1, "workers_count": 1, "transform_spec": transform}
    settings["data_loader_fn"] = BatchedDataLoader
    shard = {"cur_shard": int(os.environ["RANK"]), "shard_count": work.RANKS}

    def batches(loader: Any) -> Iterator[Any]:
        for batch in loader:
            yield batch["image"].numpy()

    with converter.make_torch_dataloader(**settings, **shard) as loader:
        own = imaging.consume(batches(loader))
    all_: list[Any] = [None] * work.RANKS
    dist.all_gather_object(all_, own)
    dist.destroy_process_group()
    return imaging.together(all_)


def read(frame: Any) -> tuple[float, int, int]:
    from petastorm.spark import make_spark_converter
    from pyspark.ml.torch.distributor import TorchDistributor

    with tempfile.TemporaryDirectory(prefix="rows-") as folder:
        frame.sparkSession.conf.set(STORE, f"file://{folder}")
        converter = make_spark_converter(frame.repartition(2 * work.RANKS))  # a file is the least that a shard takes
        distributor = TorchDistributor(num_processes=work.RANKS, local_mode=False, use_gpu=False)
        found: tuple[float, int, int] = distributor.run(take, converter)
        converter.delete()
    return found


if __name__ == "__main__":
    sys.exit(imaging.main(read, "petastorm", "torch", "pyarrow"))
