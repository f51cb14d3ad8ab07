"""pyspark's TorchDistributor over Parquet, with a loader written by hand.

The docs of TorchDistributor leave the data to the user. In its favour: each rank reads every second file into one
tensor in RAM, and takes batches out of it by a random permutation an epoch, which is the fastest that can be written.
That needs all of a rank's rows in its memory.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import work


def from_parquet(folder: str, epochs: int) -> tuple[Any, float, int]:
    import os

    import torch

    x, y = map(torch.from_numpy, work.read_share(folder, int(os.environ["RANK"])))

    def batches(_: int) -> Iterator[tuple[Any, Any]]:
        for index in torch.randperm(len(x)).split(work.BATCH):
            yield x.index_select(0, index), y.index_select(0, index)

    return work.train(epochs, batches)


def fit(frame: Any, epochs: int) -> work.Fitted:
    from pyspark.ml.torch.distributor import TorchDistributor

    with work.as_parquet(frame) as (folder, materialise):
        distributor = TorchDistributor(num_processes=work.RANKS, local_mode=False, use_gpu=False)
        layers, loop, rows = distributor.run(from_parquet, folder, epochs)
    return work.Fitted(layers, loop, rows * work.RANKS, {"materialise": materialise})


if __name__ == "__main__":
    sys.exit(work.main(fit, "torch", "pyarrow"))
