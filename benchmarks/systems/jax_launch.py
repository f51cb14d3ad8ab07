"""Tritium's launch of a JAX function over the rank's shard."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import jax_work
import work


def from_shard(epochs: int) -> tuple[Any, float, int]:
    import tritium as tr

    taken = tr.world().shard("train").jax(epochs, batch_size=work.BATCH)

    def batches(_: int) -> Iterator[tuple[Any, Any, Any]]:
        for batch in next(taken):
            yield batch["x"], batch["y"], batch.weights

    return jax_work.train(epochs, batches)


def fit(frame: Any, epochs: int) -> work.Fitted:
    import tritium as tr

    data = tr.Data(frame, columns={"x": work.FEATURES, "y": work.LABEL})
    settings = {"ranks": work.RANKS, "framework": "jax", "progress": False}
    found = tr.launch(from_shard, args=(epochs,), data={"train": data}, **settings)
    loop = max(seconds for _, seconds, _ in found)
    return work.Fitted(found[0][0], loop, sum(taken for *_, taken in found), {})


if __name__ == "__main__":
    sys.exit(work.main(fit, "jax", "pyarrow"))
