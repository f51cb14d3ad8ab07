"""pyspark's TorchDistributor with its private DataFrame path, `_train_on_dataframe`.

In its favour: the features are one array column (64 columns cost it another Python object each), two partitions as its
docstring asks for, one DataLoader worker (its default; more are refused). It has no shuffle of rows between epochs.
"""

from __future__ import annotations

import sys
from typing import Any

import work


def from_partition(rows: int, epochs: int) -> tuple[Any, float, int]:
    from pyspark.ml.torch.distributor import _get_spark_partition_data_loader

    return work.train(epochs, lambda _: _get_spark_partition_data_loader(rows, work.BATCH))


def fit(frame: Any, epochs: int) -> work.Fitted:
    from pyspark.ml.torch.distributor import TorchDistributor

    rows = frame.count() // work.RANKS  # it has to be told
    distributor = TorchDistributor(num_processes=work.RANKS, local_mode=False, use_gpu=False)
    layers, loop, taken = distributor._train_on_dataframe(
        from_partition, work.packed(frame).repartition(work.RANKS), rows, epochs
    )
    return work.Fitted(layers, loop, taken * work.RANKS, {})


if __name__ == "__main__":
    sys.exit(work.main(fit, "torch", "pyarrow"))
