"""Tritium's LightGBMRegressor on two ranks, one thread each."""

from __future__ import annotations

import sys
from typing import Any

import growing
import work


def fit(frame: Any, iterations: int) -> growing.Grown:
    from tritium.ml import LightGBMRegressor

    model = LightGBMRegressor(
        feature_cols=work.FEATURES,
        label_cols=work.LABEL,
        num_iterations=iterations,
        num_leaves=growing.LEAVES,
        max_bin=growing.BINS,
        learning_rate=growing.RATE,
        training_metric=False,
        ranks=work.RANKS,
        progress=False,
        native_params={"num_threads": 1},
    ).fit(frame)
    loop = sum(entry["seconds"] for entry in model.history)
    return growing.Grown(model.booster().predict, loop, None, {})


if __name__ == "__main__":
    sys.exit(growing.main(fit, "lightgbm", "pyarrow"))
