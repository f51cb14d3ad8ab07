"""Tritium: the binary column with `decode=`, in a loop of one's own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import imaging
import work


def take() -> tuple[float, int, int]:
    import tritium as tr

    def batches() -> Iterator[Any]:
        for epoch in tr.world().shard("train").epochs(1, batch_size=imaging.BATCH):
            for batch in epoch:
                yield batch["image"][: batch.rows]

    return imaging.consume(batches())


def read(frame: Any) -> tuple[float, int, int]:
    import tritium as tr

    data = tr.Data(frame, decode={"image": imaging.decode})
    return imaging.together(tr.launch(take, ranks=work.RANKS, data={"train": data}, progress=False))


if __name__ == "__main__":
    sys.exit(imaging.main(read, "pyarrow"))
