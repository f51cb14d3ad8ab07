"""mosaicml-streaming: MDS shards of the bytes, decoded when a sample is asked for, in TorchDistributor's processes.

In local mode, as in mosaic_streaming.py.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import imaging
import work


def take(folder: str) -> Any:
    import numpy as np
    import torch.distributed as dist
    from streaming import StreamingDataset
    from torch.utils.data import DataLoader

    dist.init_process_group("gloo")
    rows = StreamingDataset(local=folder, batch_size=imaging.BATCH, shuffle=True)

    def stacked(samples: list[dict[str, Any]]) -> Any:
        return np.stack([imaging.decode(sample["image"]) for sample in samples])

    def batches() -> Iterator[Any]:
        yield from DataLoader(rows, batch_size=imaging.BATCH, collate_fn=stacked)

    own = imaging.consume(batches())
    all_: list[Any] = [None] * work.RANKS
    dist.all_gather_object(all_, own)
    dist.destroy_process_group()
    return imaging.together(all_)


def read(frame: Any) -> tuple[float, int, int]:
    from pyspark.ml.torch.distributor import TorchDistributor
    from streaming.base.converters import dataframe_to_mds
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()
    with tempfile.TemporaryDirectory(prefix="rows-") as folder:
        columns = {"image": "bytes", "label": "int64"}
        dataframe_to_mds(frame, merge_index=True, mds_kwargs={"out": f"{folder}/mds", "columns": columns})
        distributor = TorchDistributor(num_processes=work.RANKS, local_mode=True, use_gpu=False)
        found: tuple[float, int, int] = distributor.run(take, f"{folder}/mds")
    return found


if __name__ == "__main__":
    sys.exit(imaging.main(read, "mosaicml-streaming", "torch", "pyarrow"))
