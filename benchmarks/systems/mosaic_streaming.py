"""mosaicml-streaming: rows as MDS by its `dataframe_to_mds`, StreamingDataset in TorchDistributor's processes.

In its favour: the features are one array per row (64 columns cost it 64 entries a row), no DataLoader workers beside
the two ranks on two cores. TorchDistributor's local mode: in two tasks on one host, both ranks have LOCAL_RANK 0, and
their shared memory has the same names.
"""

from __future__ import annotations

import sys
import tempfile
import time
from typing import Any

import work


def from_mds(folder: str, epochs: int) -> tuple[Any, float, int]:
    from streaming import StreamingDataset
    from torch.utils.data import DataLoader

    rows = StreamingDataset(local=folder, batch_size=work.BATCH, shuffle=True)
    loader = DataLoader(rows, batch_size=work.BATCH, drop_last=True)

    def batches(_: int) -> Any:
        return ((batch["x"], batch["y"]) for batch in loader)

    return work.train(epochs, batches)


def fit(frame: Any, epochs: int) -> work.Fitted:
    from pyspark.ml.torch.distributor import TorchDistributor
    from pyspark.sql import functions as F
    from streaming.base.converters import dataframe_to_mds
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()
    with tempfile.TemporaryDirectory(prefix="rows-") as folder:
        began = time.perf_counter()
        columns = {"x": f"ndarray:float32:{work.WIDTH}", work.LABEL: "float32"}
        rows = work.packed(frame).select(F.col("x").cast("array<float>"), work.LABEL)  # it knows only nullable elements
        dataframe_to_mds(rows, merge_index=True, mds_kwargs={"out": f"{folder}/mds", "columns": columns})
        materialise = time.perf_counter() - began
        distributor = TorchDistributor(num_processes=work.RANKS, local_mode=True, use_gpu=False)
        layers, loop, rows = distributor.run(from_mds, f"{folder}/mds", epochs)
    return work.Fitted(layers, loop, rows * work.RANKS, {"materialise": materialise})


if __name__ == "__main__":
    sys.exit(work.main(fit, "mosaicml-streaming", "torch", "pyarrow"))
