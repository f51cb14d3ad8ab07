"""Tritium's launch: the loop of one's own over the rank's shard."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import work


def from_shard(epochs: int) -> tuple[Any, float, int]:
    import tritium as tr

    taken = tr.world().shard("train").epochs(epochs, batch_size=work.BATCH, device="cpu")

    def batches(_: int) -> Iterator[tuple[Any, Any, float]]:
        for batch in next(taken):
            yield batch["x"], batch["y"], batch.scale

    return work.train(epochs, batches)


def fit(frame: Any, epochs: int) -> work.Fitted:
    import tritium as tr

    data = tr.Data(frame, columns={"x": work.FEATURES, "y": [work.LABEL]})
    settings = {"ranks": work.RANKS, "framework": "torch", "progress": False}
    found = tr.launch(from_shard, args=(epochs,), data={"train": data}, **settings)
    return work.Fitted(found[0][0], max(seconds for _, seconds, _ in found), sum(rows for *_, rows in found), {})


if __name__ == "__main__":
    sys.exit(work.main(fit, "torch", "pyarrow"))
