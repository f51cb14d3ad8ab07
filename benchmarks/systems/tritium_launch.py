"""Tritium's launch: the loop of one's own over the rank's shard. `tritium_launch.py stream`: with shuffle="stream"."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import work


def from_shard(epochs: int) -> tuple[tuple[Any, float, int], list[float]]:
    import tritium as tr
    from tritium.torch import host_memory

    taken = tr.world().shard("train").epochs(epochs, batch_size=work.BATCH, device="cpu")

    def batches(_: int) -> Iterator[tuple[Any, Any, float]]:
        for batch in next(taken):
            yield batch["x"], batch["y"], batch.scale

    each: list[float] = []
    return work.train(epochs, batches, each=each, exchange=host_memory), each


def fit(frame: Any, epochs: int) -> work.Fitted:
    import tritium as tr

    data = tr.Data(frame, columns={"x": work.FEATURES, "y": [work.LABEL]}, shuffle=SHUFFLE)
    settings = {"ranks": work.RANKS, "framework": "torch", "progress": False}
    found = tr.launch(from_shard, args=(epochs,), data={"train": data}, **settings)
    (layers, _, _), _ = found[0]
    loop, rows = max(seconds for (_, seconds, _), _ in found), sum(taken for (*_, taken), _ in found)
    return work.Fitted(layers, loop, rows, work.by_epoch([each for _, each in found]))


SHUFFLE = "full"

if __name__ == "__main__":
    if "stream" in sys.argv:
        sys.argv.remove("stream")
        SHUFFLE = "stream"
    sys.exit(work.main(fit, "torch", "pyarrow"))
