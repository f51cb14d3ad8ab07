"""spark-tensorflow-distributor over Parquet: MultiWorkerMirroredStrategy in barrier tasks, `tf_keras`' model.fit.

In its favour: each worker reads every second file into RAM with pyarrow (its README reads the whole data set in every
worker and lets TensorFlow drop the half), shuffles by a permutation of its own an epoch, and `tf.data` only cuts
batches. Keras 3 fails under this strategy; `tf_keras` is what works.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import work


def from_parquet(folder: str, epochs: int) -> tuple[Any, float, int]:
    import json

    import numpy as np
    import tensorflow as tf

    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    x, y = work.read_share(folder, rank)
    steps = len(x) // work.BATCH

    def permuted() -> Any:
        order = np.random.permutation(len(x))
        for index in np.split(order[: steps * work.BATCH], steps):
            yield x[index], y[index]

    kinds = (tf.TensorSpec((work.BATCH, work.WIDTH), tf.float32), tf.TensorSpec((work.BATCH,), tf.float32))
    strategy = tf.distribute.get_strategy()
    rows = strategy.distribute_datasets_from_function(
        lambda _: tf.data.Dataset.from_generator(permuted, output_signature=kinds).repeat().prefetch(4)
    )
    layers = [tf.keras.layers.Dense(256, "relu"), tf.keras.layers.Dense(256, "relu"), tf.keras.layers.Dense(1)]
    model = tf.keras.Sequential([tf.keras.Input((work.WIDTH,)), *layers])
    model.compile(optimizer=tf.keras.optimizers.Adam(work.RATE), loss="mse")
    began = time.perf_counter()
    model.fit(rows, epochs=epochs, steps_per_epoch=steps, verbose=0)
    seconds = time.perf_counter() - began
    return work.paired(model.get_weights()), seconds, steps * work.BATCH * epochs


def fit(frame: Any, epochs: int) -> work.Fitted:
    from spark_tensorflow_distributor import MirroredStrategyRunner

    with work.as_parquet(frame) as (folder, materialise):
        runner = MirroredStrategyRunner(num_slots=work.RANKS, local_mode=False, use_gpu=False)
        layers, loop, rows = runner.run(from_parquet, folder=folder, epochs=epochs)
    return work.Fitted(layers, loop, rows * work.RANKS, {"materialise": materialise})


if __name__ == "__main__":  # of Spark's workers too: the distributor imports TensorFlow before it calls the function
    os.environ |= {"TF_USE_LEGACY_KERAS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    os.environ |= {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}
    sys.exit(work.main(fit, "tensorflow", "tf-keras", "spark-tensorflow-distributor", "pyarrow"))
