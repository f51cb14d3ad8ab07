"""horovod.spark's KerasEstimator over a LocalStore (pyspark 3.5, TensorFlow 2.12 with its Keras 2), by its own loop."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from typing import Any

import keras_work
import work


def fit(frame: Any, epochs: int) -> work.Fitted:
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import tensorflow as tf
    from horovod.spark.common.backend import SparkBackend
    from horovod.spark.common.store import LocalStore
    from horovod.spark.keras import KerasEstimator

    tf.random.set_seed(0)
    with tempfile.TemporaryDirectory(prefix="store-") as folder, contextlib.redirect_stdout(sys.stderr):
        model = KerasEstimator(
            backend=SparkBackend(num_proc=work.RANKS, use_gloo=True, use_mpi=False, verbose=0),
            store=LocalStore(folder),
            model=keras_work.make_model(),
            optimizer=tf.keras.optimizers.Adam(work.RATE / work.RANKS),  # which it multiplies by the ranks
            loss="mse",
            feature_cols=["x"],
            label_cols=[work.LABEL],
            batch_size=work.BATCH,
            epochs=epochs,
            use_gpu=False,
            verbose=0,
        ).fit(work.packed(frame))
    return work.Fitted(keras_work.layers_of(model.getModel()), None, None, {})


if __name__ == "__main__":
    sys.exit(work.main(fit, "horovod", "petastorm", "tensorflow-cpu", "keras", "pyarrow"))
