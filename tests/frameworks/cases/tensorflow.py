"""TensorFlow: MultiWorkerMirroredStrategy with a loop of one's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tritium as tr

FRAMEWORK, ENV, PACKAGES = "tensorflow", {}, ("tensorflow",)  # type: ignore[var-annotated]


def train(on_step: Callable[[int], None]) -> dict[str, Any]:
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    shard = tr.world().shard("train")
    rows = shard.tensorflow(batch_size=max(shard.counts), columns=("x", "y"))
    with strategy.scope():
        w = tf.Variable(tf.zeros(5))

    def step(x: Any, y: Any, weights: Any) -> None:
        with tf.GradientTape() as tape:
            error = tf.linalg.matvec(x, w[:4]) + w[4] - y
            loss = tf.reduce_mean(weights * error**2)
        (gradient,) = tape.gradient(loss, [w])
        w.assign_sub(0.1 * tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, gradient))

    run = tf.function(lambda batch: strategy.run(step, batch))
    distributed = strategy.experimental_distribute_dataset(rows)
    for epoch in range(20):
        for batch in distributed:
            on_step(epoch)
            run(batch)
    task = strategy.cluster_resolver.task_id
    return {"rank": task, "size": strategy.num_replicas_in_sync, "weights": w.numpy().tolist()}
