"""The parameters of LightGBM that the settings stand for (driver, rank)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightgbm import basic

from tritium.errors import BadSetting
from tritium.hints import suggest
from tritium.ml.lightgbm.features import Features
from tritium.ml.lightgbm.settings import LightGBMRankerSettings, LightGBMSettings

# These parameters of LightGBM are refused in native_params: parameter → the setting to give.
_SETTINGS = {
    **{
        name: name
        for name in (
            *("num_iterations", "learning_rate", "num_leaves", "max_depth", "min_data_in_leaf", "feature_fraction"),
            *("bagging_fraction", "bagging_freq", "lambda_l1", "lambda_l2", "max_bin", "boosting", "objective"),
            *("tree_learner", "monotone_constraints", "seed", "num_class", "eval_at"),
        )
    },
    "metric": "metrics",
    "categorical_feature": "categorical_features",
    "early_stopping_round": "early_stopping",
    "early_stopping_min_delta": "early_stopping",
    "first_metric_only": "early_stopping",
    "is_provide_training_metric": "training_metric",
    "label_column": "label_cols",
    "weight_column": "weight_col",
    "group_column": "group_col",
    "ignore_column": "feature_cols",
}
_NETWORK = ("machines", "num_machines", "machine_list_filename", "local_listen_port", "time_out", "pre_partition")
_FILES = (
    *("task", "data", "valid", "input_model", "output_model", "config", "header", "two_round", "snapshot_freq"),
    *("save_binary", "parser_config_file", "precise_float_parser"),
)


def refuse_params(settings: LightGBMSettings) -> None:
    """Raise BadSetting for `native_params` that LightGBM does not have, or that are not the user's to give."""
    wrong = list(_problems(settings))
    if wrong:
        raise BadSetting(" ".join(wrong), settings=wrong)


def _problems(settings: LightGBMSettings) -> Iterator[str]:
    basic._ConfigAliases.get("seed")  # The first call reads the table of all parameters.
    table: dict[str, list[str]] = basic._ConfigAliases.aliases or {}
    known = {alias: name for name, aliases in table.items() for alias in (name, *aliases)}
    for asked, value in (settings.native_params or {}).items():
        name = known.get(asked)
        plain = value if isinstance(value, list | tuple) else [value]
        if name == "interaction_constraints":  # Its value is a list of lists of positions.
            plain = [item for part in plain for item in (part if isinstance(part, list | tuple) else [part])]
        if name is None:
            yield f"LightGBM has no parameter {asked!r} (of native_params=).{suggest(str(asked), known)}"
        elif name in _SETTINGS:
            yield f"native_params names {asked!r}; give the setting {_SETTINGS[name]}= for it."
        elif name in _NETWORK:
            yield f"native_params names {asked!r}; the ranks are connected by Tritium. Leave it out."
        elif name in _FILES or name == "linear_tree":
            why = (
                "LightGBM can't grow linear trees from rows that come in batches"
                if name == "linear_tree"
                else ("it is for LightGBM's own program, which reads files")
            )
            yield f"native_params names {asked!r}: {why}. Leave it out."
        elif not all(isinstance(item, bool | int | float | str) for item in plain):
            yield f"native_params={{{asked!r}: {value!r}}} must be a number, a string, a bool, or a list of these."


def lightgbm_params(settings: LightGBMSettings, features: Features, classes: int | None, ranks: int) -> dict[str, Any]:
    """Return the parameters for these features and a number of classes (None: no classes) on this many ranks.

    Raises BadSetting for a category or a constraint that names no feature.
    """
    objective = settings.objective or settings.objectives[0]
    if classes is not None and classes > 2 and settings.objective is None:
        objective = "multiclass"
    params: dict[str, Any] = {name: getattr(settings, name) for name in _SAME}
    native = dict(settings.native_params or {})
    params |= {"objective": objective, "verbosity": parameter(native, "verbosity", -1)}
    params["tree_learner"] = settings.tree_learner if ranks > 1 else "serial"
    if metrics := settings.given_metrics():
        params["metric"] = metrics
    if classes is not None and objective != "binary":
        params["num_class"] = classes
    if categories := features.categories(settings):
        params["categorical_column"] = categories
    if constraints := features.constraints(settings):
        params["monotone_constraints"] = constraints
    if isinstance(settings, LightGBMRankerSettings):
        params["eval_at"] = list(settings.eval_at)
    return params | native


_SAME = (
    *("learning_rate", "num_leaves", "max_depth", "min_data_in_leaf", "feature_fraction", "bagging_fraction"),
    *("bagging_freq", "lambda_l1", "lambda_l2", "max_bin", "boosting", "seed"),
)


def parameter(params: dict[str, Any], name: str, default: Any) -> Any:
    """Return the value of LightGBM's parameter `name`, under any of its names."""
    return basic._choose_param_value(name, dict(params), default)[name]
