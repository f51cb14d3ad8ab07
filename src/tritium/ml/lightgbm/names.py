"""Names of settings in other libraries, and of LightGBM's metrics (any process)."""

from __future__ import annotations

LARGER_IS_BETTER = ("auc", "auc_mu", "ndcg", "map", "average_precision")
"""Metrics of which LightGBM takes a larger value for a better one; of all others a smaller one."""
# LightGBM has several names for a metric, of which results have one: another name → that in results.
METRIC_NAMES = {
    **dict.fromkeys(("mean_absolute_error", "mae", "regression_l1"), "l1"),
    **dict.fromkeys(("mean_squared_error", "mse", "regression", "regression_l2"), "l2"),
    **dict.fromkeys(("root_mean_squared_error", "l2_root"), "rmse"),
    **dict.fromkeys(("mean_absolute_percentage_error",), "mape"),
    **dict.fromkeys(("binary",), "binary_logloss"),
    **dict.fromkeys(("multiclass", "softmax", "multiclassova", "multiclass_ova", "ova", "ovr"), "multi_logloss"),
    **dict.fromkeys(("xentropy",), "cross_entropy"),
    **dict.fromkeys(("lambdarank", "rank_xendcg"), "ndcg"),
    **dict.fromkeys(("mean_average_precision",), "map"),
}
OF_SYNAPSEML: dict[str, tuple[str, ...]] = {
    "numIterations": ("num_iterations",),
    "numLeaves": ("num_leaves",),
    "learningRate": ("learning_rate",),
    "maxDepth": ("max_depth",),
    "minDataInLeaf": ("min_data_in_leaf",),
    "featureFraction": ("feature_fraction",),
    "baggingFraction": ("bagging_fraction",),
    "baggingFreq": ("bagging_freq",),
    "baggingSeed": ("seed",),
    "lambdaL1": ("lambda_l1",),
    "lambdaL2": ("lambda_l2",),
    "maxBin": ("max_bin",),
    "boostingType": ("boosting",),
    "earlyStoppingRound": ("early_stopping",),
    "categoricalSlotNames": ("categorical_features",),
    "categoricalSlotIndexes": ("categorical_features",),
    "monotoneConstraints": ("monotone_constraints",),
    "initScoreCol": ("init_score_col",),
    "validationIndicatorCol": ("validation",),
    "featuresCol": ("feature_cols",),
    "labelCol": ("label_cols",),
    "weightCol": ("weight_col",),
    "groupCol": ("group_col",),
    "parallelism": ("tree_learner",),
    "passThroughArgs": ("native_params",),
    "numTasks": ("ranks",),
    "evalAt": ("eval_at",),
}
# Users also try the names of LightGBM, of its scikit-learn classes and of XGBoost.
OF_OTHERS: dict[str, tuple[str, ...]] = {
    "n_estimators": ("num_iterations",),
    "num_boost_round": ("num_iterations",),
    "boosting_type": ("boosting",),
    "reg_alpha": ("lambda_l1",),
    "reg_lambda": ("lambda_l2",),
    "subsample": ("bagging_fraction", "bagging_freq"),
    "subsample_freq": ("bagging_freq",),
    "colsample_bytree": ("feature_fraction",),
    "min_child_samples": ("min_data_in_leaf",),
    "random_state": ("seed",),
    "metric": ("metrics",),
    "eval_metric": ("metrics",),
    "categorical_feature": ("categorical_features",),
    "early_stopping_round": ("early_stopping",),
    "early_stopping_rounds": ("early_stopping",),
    "sample_weight": ("weight_col",),
    "init_score": ("init_score_col",),
    "group": ("group_col",),
}

# These parameters of LightGBM are no settings, and are often asked for.
OF_LIGHTGBM = (
    *("min_sum_hessian_in_leaf", "min_gain_to_split", "scale_pos_weight", "is_unbalance", "extra_trees", "num_threads"),
    *("feature_fraction_bynode", "path_smooth", "cat_smooth", "max_cat_threshold", "top_k", "device_type", "verbosity"),
    *("deterministic", "label_gain", "lambdarank_truncation_level", "alpha", "tweedie_variance_power", "drop_rate"),
)


def is_larger_better(metric: str) -> bool:
    """Return whether a larger value of this metric is a better one: of "auc", "ndcg@3"."""
    return metric.partition("@")[0] in LARGER_IS_BETTER
