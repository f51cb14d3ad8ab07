"""XGBoost's own estimator on Spark, two workers, histograms, trees of as many leaves."""

from __future__ import annotations

import sys
from typing import Any

import growing
import work


def fit(frame: Any, iterations: int) -> growing.Grown:
    from xgboost import DMatrix
    from xgboost.spark import SparkXGBRegressor

    model = SparkXGBRegressor(
        features_col=work.FEATURES,
        label_col=work.LABEL,
        num_workers=work.RANKS,
        n_estimators=iterations,
        max_leaves=growing.LEAVES,
        max_depth=0,
        grow_policy="lossguide",
        max_bin=growing.BINS,
        learning_rate=growing.RATE,
    ).fit(frame)
    booster = model.get_booster()
    return growing.Grown(lambda x: booster.predict(DMatrix(x, feature_names=booster.feature_names)))


if __name__ == "__main__":
    sys.exit(growing.main(fit, "xgboost-cpu"))
