"""pyspark's TorchDistributor over Parquet, with a loader written by hand.

The docs of TorchDistributor leave the data to the user. In its favour: each rank reads every second file into one
tensor in RAM, and takes batches out of it by a random permutation an epoch, which is the fastest that can be written.
That needs all of a rank's rows in its memory.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import work


def from_parquet(folder: str, epochs: int) -> tuple[Any, float, int]:
    import os

    import pyarrow as pa
    import pyarrow.parquet as pq
    import torch

    files = sorted(Path(folder).glob("*.parquet"))[int(os.environ["RANK"]) :: work.RANKS]
    table = pa.concat_tables(pq.read_table(file) for file in files)
    x = torch.stack([torch.from_numpy(table[name].to_numpy()) for name in work.FEATURES], dim=1)
    y = torch.from_numpy(table[work.LABEL].to_numpy().copy())

    def batches(_: int) -> Iterator[tuple[Any, Any]]:
        for index in torch.randperm(len(x)).split(work.BATCH):
            yield x.index_select(0, index), y.index_select(0, index)

    return work.train(epochs, batches)


def fit(frame: Any, epochs: int) -> work.Fitted:
    from pyspark.ml.torch.distributor import TorchDistributor

    folder = tempfile.mkdtemp(prefix="rows-")
    try:
        began = time.perf_counter()
        frame.write.mode("overwrite").parquet(folder)
        materialise = time.perf_counter() - began
        distributor = TorchDistributor(num_processes=work.RANKS, local_mode=False, use_gpu=False)
        layers, loop, rows = distributor.run(from_parquet, folder, epochs)
    finally:
        shutil.rmtree(folder)
    return work.Fitted(layers, loop, rows * work.RANKS, {"materialise": materialise})


if __name__ == "__main__":
    sys.exit(work.main(fit, "torch", "pyarrow"))
