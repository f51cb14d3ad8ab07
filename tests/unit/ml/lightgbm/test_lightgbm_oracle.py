"""Random trainings compared with `lightgbm.train`: one rank to the last bit, several within what the docs promise.

`TRITIUM_ORACLE_ROUNDS` is how many; a seed is in the name of its test.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import lightgbm
import numpy as np
import pandas as pd
import pytest

from tritium.ml import LightGBMClassifier, LightGBMModel, LightGBMRanker, LightGBMRegressor

ROUNDS = int(os.environ.get("TRITIUM_ORACLE_ROUNDS", "8"))
QUIET: dict[str, Any] = {"progress": False, "output": "none", "verbose": False}
ONE: dict[str, Any] = {"on": "here", **QUIET}
TWO: dict[str, Any] = {"on": "driver", "ranks": 2, **QUIET}
OBJECTIVES = (
    *("regression", "regression_l1", "huber", "poisson", "gamma", "quantile", "cross_entropy"),
    *("binary", "multiclass", "lambdarank"),
)
CONSTANT_HESSIAN = ("regression", "huber", "fair")


@dataclass
class Case:
    """Rows and settings of one training, drawn by `seed`."""

    seed: int
    objective: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    native: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        draw = self.draw = np.random.default_rng(self.seed)
        self.rows = int(draw.choice([60, 150, 400, 700]))
        self.frame = self._features()
        self.features = list(self.frame.columns)
        self.settings = self._settings()
        self._label()
        if draw.random() < 0.3:
            self.frame["w"] = draw.uniform(0.1, 3, self.rows)
        if draw.random() < 0.2 and self.objective in ("regression", "binary") and self.settings["boosting"] != "rf":
            self.frame["s"] = draw.normal(size=self.rows)
        self.held = self.rows - self.rows // 4 if draw.random() < 0.5 else self.rows

    def _features(self) -> pd.DataFrame:
        draw, rows = self.draw, self.rows
        kinds = {
            "normal": lambda: draw.normal(size=rows),
            "levels": lambda: draw.integers(0, 4, rows).astype(float),
            "sparse": lambda: draw.normal(size=rows) * (draw.random(rows) < 0.1),
            "constant": lambda: np.full(rows, 3.0),
            "category": lambda: draw.choice([0, 1, 2, 5, 9, 200], rows).astype(float),
        }
        frame = pd.DataFrame()
        for i, kind in enumerate(draw.choice(list(kinds), int(draw.integers(1, 9)), p=[0.4, 0.2, 0.1, 0.1, 0.2])):
            values = kinds[str(kind)]()
            if draw.random() < 0.3:
                values[draw.random(rows) < draw.uniform(0, 0.5)] = np.nan
            frame[f"{kind}_{i}"] = values
        return frame

    def _settings(self) -> dict[str, Any]:
        draw = self.draw
        chosen: dict[str, Any] = {
            "num_iterations": int(draw.integers(3, 30)),
            "num_leaves": int(draw.choice([2, 4, 31])),
            "learning_rate": float(draw.choice([0.02, 0.1, 0.5])),
            "min_data_in_leaf": int(draw.choice([1, 5, 20, 60])),
            "max_depth": int(draw.choice([-1, 2, 5])),
            "max_bin": int(draw.choice([15, 63, 255])),
            "boosting": str(draw.choice(["gbdt", "dart", "rf"], p=[0.7, 0.15, 0.15])),
            "feature_dtype": str(draw.choice(["float32", "float64"])),
            "seed": int(draw.integers(0, 1000)),
        }
        if draw.random() < 0.5:
            chosen["feature_fraction"] = float(draw.choice([0.2, 0.5, 0.9]))
        if draw.random() < 0.4 or chosen["boosting"] == "rf":
            chosen |= {
                "bagging_fraction": float(draw.choice([0.05, 0.5, 0.9])),
                "bagging_freq": int(draw.integers(1, 4)),
            }
        if draw.random() < 0.3:
            chosen |= {"lambda_l1": float(draw.uniform(0, 2)), "lambda_l2": float(draw.uniform(0, 5))}
        categories = [name for name in self.features if name.startswith("category") and draw.random() < 0.7]
        if categories:
            chosen["categorical_features"] = categories
        rising = [name for name in self.features if name.startswith("normal") and draw.random() < 0.2]
        if rising:
            chosen["monotone_constraints"] = {name: int(draw.choice([-1, 1])) for name in rising}
        natives = {
            "min_gain_to_split": float(draw.choice([0.1, 5, 50])),
            "extra_trees": True,
            "path_smooth": 1.0,
            "feature_fraction_bynode": 0.5,
            "max_delta_step": 0.3,
            "boost_from_average": False,
        }
        self.native = {name: value for name, value in natives.items() if draw.random() < 0.15}
        return chosen

    def _label(self) -> None:
        draw, frame = self.draw, self.frame
        first = frame[self.features[:3]]
        score = ((first - first.mean()) / first.std().replace(0, 1)).fillna(0).sum(axis=1).to_numpy()
        score = score + draw.normal(size=self.rows)
        self.objective = str(draw.choice(OBJECTIVES))
        odds = 1 / (1 + np.exp(-score))
        if self.objective in ("poisson", "gamma"):
            label = np.exp(score / 3) + 0.01
        elif self.objective == "cross_entropy":
            label = odds
        elif self.objective == "binary":
            label = (odds > draw.random(self.rows)).astype(int)
        elif self.objective == "multiclass":
            label = np.digitize(score, np.quantile(score, [0.3, 0.6]))
        elif self.objective == "lambdarank":
            label = np.digitize(score, np.quantile(score, [0.5, 0.8]))
            frame["q"] = draw.integers(0, max(4, self.rows // 10), self.rows)
        else:
            label = 100 * draw.normal() + score
        if self.objective in ("regression_l1", "quantile"):  # LightGBM refuses them
            self.settings.pop("monotone_constraints", None)
        frame["y"] = label
        if self.objective == "lambdarank":
            frame.sort_values("q", kind="stable", ignore_index=True, inplace=True)

    def fit(self, **gang: Any) -> LightGBMModel:
        """Train with Tritium."""
        kinds = {"lambdarank": LightGBMRanker, "binary": LightGBMClassifier, "multiclass": LightGBMClassifier}
        given: dict[str, Any] = {"feature_cols": self.features, "label_cols": "y", "objective": self.objective}
        given |= {"native_params": {"num_threads": 1, **self.native}, **self.settings, **gang}
        for column, name in (("w", "weight_col"), ("s", "init_score_col"), ("q", "group_col")):
            given |= {name: column} if column in self.frame else {}
        if self.held < self.rows:
            given["validation"] = self.frame[self.held :]
        return kinds.get(self.objective, LightGBMRegressor)(**given).fit(self.frame[: self.held])

    def expected(self) -> tuple[lightgbm.Booster, list[dict[str, float]]]:
        """Train with LightGBM alone, and return its booster and the metrics after each iteration."""
        own = ("feature_dtype", "categorical_features", "monotone_constraints")
        params = {"objective": self.objective, "verbosity": -1, "num_threads": 1, **self.native}
        params |= {name: value for name, value in self.settings.items() if name not in own}
        if given := self.settings.get("monotone_constraints"):
            params["monotone_constraints"] = [given.get(name, 0) for name in self.features]
        params |= {"num_class": 3} if self.objective == "multiclass" else {}
        params |= {"eval_at": [1, 2, 3, 4, 5]} if self.objective == "lambdarank" else {}
        data = self._dataset(self.frame[: self.held])
        sets, names = [data], ["training"]
        if self.held < self.rows:
            sets.append(self._dataset(self.frame[self.held :], data))
            names.append("validation")
        history: list[dict[str, float]] = []

        def record(env: Any) -> None:
            found = {(str(r[0]), str(r[1])): float(r[2]) for r in env.evaluation_result_list}
            entry = {name if part == "training" else f"validation_{name}": v for (part, name), v in found.items()}
            history.append({"trees": env.model.current_iteration(), **entry})

        return lightgbm.train(params, data, valid_sets=sets, valid_names=names, callbacks=[record]), history

    def _dataset(self, frame: pd.DataFrame, reference: lightgbm.Dataset | None = None) -> lightgbm.Dataset:
        positions = [self.features.index(name) for name in self.settings.get("categorical_features", ())]
        return lightgbm.Dataset(
            self.x(frame),
            frame.y,
            reference=reference,
            weight=frame.get("w"),
            init_score=frame.get("s"),
            group=frame.groupby("q").size().to_numpy() if "q" in frame else None,
            categorical_feature=positions,
            feature_name=self.features,
        )

    def x(self, frame: pd.DataFrame) -> np.ndarray:
        """Return the features as LightGBM is given them."""
        return frame[self.features].to_numpy(self.settings["feature_dtype"])


def trees(booster: lightgbm.Booster) -> str:
    """Return the trees, without the parameters, which differ by names alone."""
    return booster.model_to_string(num_iteration=-1).partition("\nTree=0")[2].partition("end of trees")[0]


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_one_rank_is_lightgbm_tree_by_tree(seed: int) -> None:
    case = Case(seed)
    plain, history = case.expected()
    model = case.fit(**ONE)
    if case.settings["boosting"] == "dart" and len(model.history) < len(history):
        return  # see test_dart_ends_where_lightgbm_would_lose_trees
    assert trees(model.booster()) == trees(plain)
    raw = plain.predict(case.x(case.frame))
    raw = np.stack([1 - raw, raw], axis=1) if case.objective == "binary" else raw
    np.testing.assert_array_equal(predictions(model, case), raw)
    assert [{name: entry[name] for name in history[0]} for entry in model.history] == history


@pytest.mark.processes
@pytest.mark.parametrize("seed", range(max(ROUNDS // 4, 1)))
def test_two_ranks_are_one(seed: int) -> None:
    """To rounding where second derivatives are constant and no rows are drawn; else the metric is near.

    In small leaves, and where outputs are cut, splits have equal gains, of which ranks may take another one.
    """
    case = Case(seed)
    one, two = case.fit(**ONE), case.fit(**TWO)
    assert len(two.history) == len(one.history) or case.settings["boosting"] == "dart"
    drawn = "bagging_freq" in case.settings or "extra_trees" in case.native
    equal = case.settings["min_data_in_leaf"] < 5 or "max_delta_step" in case.native
    if case.objective in CONSTANT_HESSIAN and "w" not in case.frame and not drawn and not equal:
        np.testing.assert_allclose(predictions(two, case), predictions(one, case), rtol=1e-9)
    elif not drawn:
        metric = list(one.history[-1])[2]
        assert two.history[-1][metric] == pytest.approx(one.history[-1][metric], rel=0.2), metric


def test_dart_ends_where_lightgbm_would_lose_trees() -> None:
    """LightGBM leaves trees out that it had dropped for an iteration without a split: its l2 goes from 1 to 90,000."""
    case = Case(113)
    plain, history = case.expected()
    model = case.fit(**ONE)
    ended = len(model.history)
    assert [entry["l2"] for entry in model.history] == [entry["l2"] for entry in history[:ended]]
    assert history[ended - 1]["l2"] < 1 < 10_000 < history[ended]["l2"]
    train = case.frame[: case.held]
    assert ((model.predict(train) - train.y) ** 2).mean() == pytest.approx(model.history[-1]["l2"], rel=1e-3)
    assert ((plain.predict(case.x(train)) - train.y) ** 2).mean() > 10_000
    case.settings["num_iterations"] = ended
    plain, _ = case.expected()
    np.testing.assert_array_equal(model.predict(train), plain.predict(case.x(train)))
    assert trees(model.booster()) == trees(plain)


def predictions(model: LightGBMModel, case: Case) -> np.ndarray:
    """Return what the model predicts of all rows of the case."""
    found = model.predict(case.frame)
    return found if isinstance(found, np.ndarray) else found["probability"]
