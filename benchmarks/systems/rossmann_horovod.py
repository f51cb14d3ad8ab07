"""horovod.spark's KerasEstimator on Rossmann's sales, over a local Store, as its own example calls it.

Run in two environments: its own (pyspark 3.5, TensorFlow 2.12 with its Keras 2), and Tritium's, where `tritium.compat`
takes its place (Keras 3 on the back end that KERAS_BACKEND names, else on JAX).
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from importlib.util import find_spec
from typing import Any

import rossmann_work
import work

REAL = find_spec("horovod") is not None
if not REAL:
    os.environ.setdefault("KERAS_BACKEND", "jax")
    import tritium.compat  # noqa: F401


def fit(frame: Any, epochs: int, facts: dict[str, Any]) -> Any:
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    if REAL:
        from horovod.tensorflow.keras.callbacks import BestModelCheckpoint
        from tensorflow import keras
    else:
        import keras
        from horovod.keras.callbacks import BestModelCheckpoint
    from horovod.spark.common.backend import SparkBackend
    from horovod.spark.common.store import Store
    from horovod.spark.keras import KerasEstimator

    objects = rossmann_work.custom_objects(keras, facts)
    with tempfile.TemporaryDirectory(prefix="store-") as folder, contextlib.redirect_stdout(sys.stderr):
        model = KerasEstimator(
            backend=SparkBackend(num_proc=work.RANKS, use_gloo=True, use_mpi=False, verbose=0),
            store=Store.create(folder),
            model=rossmann_work.make_model(keras, facts),
            optimizer=keras.optimizers.Adam(rossmann_work.RATE / work.RANKS, epsilon=1e-3),  # it multiplies by ranks
            loss="mae",
            metrics=[objects["exp_rmspe"]],
            custom_objects=objects,
            feature_cols=rossmann_work.columns(facts),
            label_cols=[rossmann_work.LABEL],
            validation="Validation",
            checkpoint_callback=BestModelCheckpoint(monitor="val_exp_rmspe", mode="min", save_freq="epoch"),
            batch_size=rossmann_work.BATCH,
            epochs=epochs,
            use_gpu=False,
            verbose=0,
        ).fit(frame)
    return model.getModel()


if __name__ == "__main__":
    packages = ("horovod", "petastorm", "tensorflow-cpu", "pyarrow") if REAL else ("keras", "jax", "pyarrow")
    sys.exit(rossmann_work.main(fit, *packages))
