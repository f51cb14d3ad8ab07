"""Plain Keras in one process, as without a cluster: the rows come to the driver by Arrow, and `fit` has them in RAM.

With two threads on torch, as the others have two ranks; the other back ends choose by themselves.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import keras_work
import work


def fit(frame: Any, epochs: int) -> work.Fitted:
    os.environ.setdefault("KERAS_BACKEND", "torch")
    import keras
    import numpy as np

    if keras.backend.backend() == "torch":
        import torch

        torch.set_num_threads(work.RANKS)
    began = time.perf_counter()
    table = frame.toArrow()
    x = np.stack([table[name].to_numpy() for name in work.FEATURES], axis=1)
    y = table[work.LABEL].to_numpy().reshape(-1, 1).copy()
    parts = {"rows to the driver": time.perf_counter() - began}
    keras.utils.set_random_seed(0)
    model = keras_work.make_model()
    model.compile(keras.optimizers.Adam(work.RATE), "mse")
    began = time.perf_counter()
    model.fit(x, y, batch_size=work.BATCH * work.RANKS, epochs=epochs, verbose=0)
    return work.Fitted(keras_work.layers_of(model), time.perf_counter() - began, len(x) * epochs, parts)


if __name__ == "__main__":
    sys.exit(work.main(fit, "keras", "torch", "pyarrow"))
