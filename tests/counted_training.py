"""The training that random faults hit on clusters of several hosts: it counts every row once an epoch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import tritium as tr
from clusters import wait

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


def hit(spark: Any, run_dir: str, seed: int, fault: str, moment: float, strike: Callable[[], object]) -> None:
    """Train on a session, let the fault strike so many seconds after the gang has formed, and check what comes out.

    Prints a row of the table in the docs, and waits for what the fault has left to a timer.
    """
    data = {"train": spark.range(ROWS).withColumnRenamed("id", "key")}
    quiet: dict[str, Any] = {"progress": False, "output": "none"}
    with tr.submit(train, spark=spark, data=data, ranks=RANKS, retries=3, run_dir=run_dir, **quiet) as run:
        wait(lambda: run.status == "running", "the gang has formed")
        time.sleep(moment)
        strike()
        began = time.monotonic()
        results = run.result(400)
    losses = sum(event.kind == "retry" for event in run.events())
    print(f"| {seed} | {fault} | {moment:.1f} s | {losses} | {time.monotonic() - began:.0f} s |")
    assert results == [RESULT] * RANKS
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join()
