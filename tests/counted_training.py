"""The training that random faults hit on clusters of several hosts: it counts every row once an epoch."""

from __future__ import annotations

import time

import tritium as tr

ROWS, EPOCHS, BATCH, RANKS = 400, 3, 10, 2
RESULT = (EPOCHS * sum(range(ROWS)), EPOCHS * ROWS // RANKS // BATCH)  # of each rank, whatever has happened


def train() -> tuple[int, int]:
    """Return the sum of all keys of all epochs, and the number of steps."""
    world = tr.world()
    saved = world.checkpoint.load()
    total, step = (0, 0) if saved is None else (saved["total"], saved.step)
    shard = world.shard("train")
    resume = None if saved is None else [own["position"] for own in saved.own]
    for epoch in shard.epochs(EPOCHS, batch_size=BATCH, seed=7, resume=resume):
        for batch in epoch:
            keys = [int(key) for key in batch["key"][: batch.rows].reshape(-1)]
            total += sum(map(sum, world.gather(keys)))
            step += 1
            state = {"total": total}
            world.checkpoint.save(state, step, own=lambda: {"position": shard.state()}, every=5)
            time.sleep(0.15)
    return total, step
