"""Tritium's KerasEstimator on Rossmann's sales; Keras on the back end that KERAS_BACKEND names, else on JAX."""

from __future__ import annotations

import os
import sys
from typing import Any

import rossmann_work
import work


def fit(frame: Any, epochs: int, facts: dict[str, Any]) -> Any:
    os.environ.setdefault("KERAS_BACKEND", "jax")
    import keras

    from tritium.ml import EarlyStopping, KerasEstimator

    objects = rossmann_work.custom_objects(keras, facts)
    model = KerasEstimator(
        model=rossmann_work.make_model(keras, facts),
        optimizer=keras.optimizers.Adam(rossmann_work.RATE, epsilon=1e-3),
        loss="mae",
        metrics=[objects["exp_rmspe"]],
        custom_objects=objects,
        feature_cols={name: name for name in rossmann_work.columns(facts)},
        label_cols=[rossmann_work.LABEL],
        validation="Validation",
        early_stopping=EarlyStopping(monitor="validation_exp_rmspe", patience=epochs),
        batch_size=rossmann_work.BATCH,
        remainder="repeat",  # as horovod.spark: all batches full, so that JAX compiles no second step for a short one
        epochs=epochs,
        ranks=work.RANKS,
        progress=False,
        verbose=False,
    ).fit(frame)
    return model.keras()


if __name__ == "__main__":
    sys.exit(rossmann_work.main(fit, "keras", "jax", "pyarrow"))
