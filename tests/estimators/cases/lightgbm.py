"""`LightGBMRegressor`: trees of a few leaves."""

from __future__ import annotations

from typing import Any

PACKAGES = ("lightgbm",)
GRID = ("num_iterations", [1, 40])
RTOL = 1e-4  # LightGBM starts from the mean of the ranks' means


def estimator(**settings: Any) -> Any:
    from tritium.ml import LightGBMRegressor

    own = {"label_cols": "y", "num_iterations": 40, "num_leaves": 7, "min_data_in_leaf": 5, "checkpoint_every": 1}
    return LightGBMRegressor(**{**own, "native_params": {"num_threads": 1}, **settings})


def classifier(classes: int, **settings: Any) -> Any:
    from tritium.ml import LightGBMClassifier

    own = {"num_iterations": 20, "num_leaves": 7, "min_data_in_leaf": 5, "native_params": {"num_threads": 1}}
    return LightGBMClassifier(**{**own, **settings})
