"""Decoding alone: two processes with one half of the files each, read beforehand."""

from __future__ import annotations

import sys
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import imaging
import numpy as np
import work


def take(files: list[str]) -> tuple[float, int, int]:
    import pyarrow.parquet as pq

    bodies = [body for file in files for body in pq.read_table(file)["image"].to_pylist()]
    starts = range(0, len(bodies), imaging.BATCH)
    return imaging.consume(np.stack([imaging.decode(b) for b in bodies[at : at + imaging.BATCH]]) for at in starts)


def read(frame: Any) -> tuple[float, int, int]:
    files = sorted(Path(name.removeprefix("file:")).as_posix() for name in frame.inputFiles())
    with get_context("spawn").Pool(work.RANKS) as pool:
        return imaging.together(pool.map(take, [files[rank :: work.RANKS] for rank in range(work.RANKS)], chunksize=1))


if __name__ == "__main__":
    sys.exit(imaging.main(read, "pyarrow"))
