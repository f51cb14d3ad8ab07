"""Tritium's KerasEstimator."""

from __future__ import annotations

import os
import sys
from typing import Any

import keras_work
import work


def fit(frame: Any, epochs: int) -> work.Fitted:
    os.environ.setdefault("KERAS_BACKEND", "torch")
    import keras

    from tritium.ml import KerasEstimator

    model = KerasEstimator(
        model=keras_work.make_model,
        loss="mse",
        optimizer=keras.optimizers.Adam(work.RATE),
        feature_cols=work.FEATURES,
        label_cols=[work.LABEL],
        batch_size=work.BATCH,
        epochs=epochs,
        ranks=work.RANKS,
        progress=False,
        verbose=False,
    ).fit(frame)
    loop, rows = (sum(epoch[name] for epoch in model.history) for name in ("seconds", "rows"))
    return work.Fitted(keras_work.layers_of(model.keras()), loop, rows, {})


if __name__ == "__main__":
    sys.exit(work.main(fit, "keras", "torch", "pyarrow"))
