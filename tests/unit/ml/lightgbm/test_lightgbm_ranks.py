"""Several ranks train the model of one, also when one is killed, and a later fit continues."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.datasets import load_breast_cancer, load_diabetes

import tritium as tr
from tritium.errors import BadSetting, DataChanged, EmptyShard
from tritium.gang.driver import launch
from tritium.ml import EarlyStopping, LightGBMClassifier, LightGBMRanker, LightGBMRegressor
from tritium.ml.fitting import prepare
from tritium.ml.lightgbm import bins
from tritium.ml.lightgbm.backend import LightGBMBackend
from tritium.ml.lightgbm.training import train

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
QUIET: dict[str, Any] = {"progress": False, "output": "none", "num_iterations": 20, "on": "driver", "ranks": 2}
ONE: dict[str, Any] = {"on": "here", "ranks": 1}
NATIVE: dict[str, Any] = {"num_threads": 1}


def rows() -> pd.DataFrame:
    frame = load_diabetes(as_frame=True).frame
    frame["sex"] = (frame.sex > 0).astype(int)
    frame.loc[::5, "bmi"] = np.nan
    return frame


def regressor(**settings: Any) -> LightGBMRegressor:
    frame = rows()
    names = [name for name in frame.columns if name != "target"]
    given = {"feature_cols": names, "label_cols": "target", "native_params": NATIVE, **QUIET}
    return LightGBMRegressor(**given | settings)


def test_three_ranks_are_one() -> None:
    """With the same bins, predictions differ by the mean to start from alone.

    LightGBM takes the mean of the ranks' means, which is another one where ranks have 148, 147 and 147 rows. On ranks
    of 221 and 221 rows the difference is 6e-14.
    """
    frame = rows()
    settings: dict[str, Any] = {"categorical_features": ["sex"], "monotone_constraints": {"s5": 1}}
    settings["metrics"] = ["rmse", "l1"]
    one = regressor(**settings, **ONE).fit(frame)
    three = regressor(**settings, ranks=3, validation=frame[4:5]).fit(frame)  # of which two ranks have no row
    np.testing.assert_allclose(three.predict(frame), one.predict(frame), rtol=1e-4)
    assert [t.count("Tree=") for t in (three.booster().model_to_string(), one.booster().model_to_string())] == [20, 20]
    error = three.predict(frame) - frame.target
    assert three.history[-1]["rmse"] == pytest.approx(np.sqrt((error**2).mean()), rel=1e-6), "over all rows, exactly"
    assert three.history[-1]["validation_l1"] == pytest.approx(abs(error[4]), rel=1e-6)
    assert three.history[-1]["l1"] == pytest.approx(np.abs(error).mean(), rel=1e-6)


@pytest.mark.parametrize("objective", ["regression", "poisson", "cross_entropy"])
def test_two_ranks_begin_with_the_average_of_all_rows(objective: str) -> None:
    draw = np.random.default_rng(1)
    frame = pd.DataFrame({"x": draw.normal(size=41), "y": draw.random(41), "w": draw.uniform(0, 9, 41)})
    settings: dict[str, Any] = {"feature_cols": ["x"], "objective": objective, "label_cols": "y", "weight_col": "w"}
    nothing, small = {"min_data_in_leaf": 41}, {"min_data_in_leaf": 1, "num_leaves": 4, "boosting": "dart"}
    for more in (nothing, small):
        one, two = (regressor(**settings, **more, **gang).fit(frame) for gang in (ONE, {}))
        np.testing.assert_allclose(two.predict(frame), one.predict(frame), rtol=1e-9)
        assert two.history[-1]["trees"] == (1 if more is nothing else 20)
        refit = [model.booster().refit(frame[["x"]], frame.y, verbosity=-1) for model in (one, two)]
        np.testing.assert_allclose(refit[1].predict(frame[["x"]]), refit[0].predict(frame[["x"]]), rtol=1e-9)
    if objective == "regression":
        assert regressor(**settings, **nothing).fit(frame).predict(frame)[0] == pytest.approx(
            np.average(frame.y, weights=frame.w), rel=1e-6
        )


def test_a_rank_that_is_killed_is_tried_again_from_the_checkpoint(tmp_path: Path) -> None:
    class Kills(EarlyStopping):
        def better(self, value: float, best: float | None) -> bool:
            seen = tmp_path / f"seen-{tr.world().rank}"
            seen.write_text(f"{seen.read_text() if seen.exists() else ''}.")
            if tr.world().rank == 1 and len(seen.read_text()) == 15:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().better(value, best)

    frame, run_dir = rows(), str(tmp_path / "run")
    undisturbed = regressor().fit(frame)
    rule = Kills(patience=99, monitor="l2")
    killed = regressor(early_stopping=rule, checkpoint_every=5, run_dir=run_dir).fit(frame)
    assert len((tmp_path / "seen-1").read_text()) == 15 + 10, "of 20 iterations 15, then from the 11th on"
    np.testing.assert_allclose(killed.predict(frame), undisturbed.predict(frame), rtol=1e-12)
    assert [entry["iteration"] for entry in killed.history] == list(range(1, 21))

    longer = regressor(run_dir=run_dir, num_iterations=30, **ONE).fit(frame)  # also with another number of ranks
    assert len(longer.history) == longer.booster().num_trees() == 30
    np.testing.assert_allclose(
        longer.predict(frame), regressor(num_iterations=30, **ONE).fit(frame).predict(frame), 1e-4
    )
    ended = regressor(run_dir=run_dir, num_iterations=25, **ONE).fit(frame)
    assert len(ended.history) == 30
    with pytest.raises(BadSetting, match="of another training: num_leaves: 7, was 31"):
        regressor(run_dir=run_dir, num_leaves=7, **ONE).fit(frame)
    with pytest.raises(DataChanged, match="the rows are not those of the checkpoint: 400 rows, were 442"):
        regressor(run_dir=run_dir, num_iterations=40, **ONE).fit(frame[:400])
    more = regressor(run_dir=run_dir, num_iterations=33, if_data_changed="restart", **ONE).fit(frame[:400])
    assert len(more.history) == 33


def test_voting_ranks_stop_together_and_classify() -> None:
    frame = load_breast_cancer(as_frame=True).frame
    names = [name for name in frame.columns if name != "target"]
    settings: dict[str, Any] = {"feature_cols": names, "label_cols": "target", "metrics": ["auc", "binary_logloss"]}
    settings |= {"validation": 0.3, "early_stopping": 3, "native_params": NATIVE, "num_iterations": 200, "seed": 1}
    found = [
        LightGBMClassifier(**{**QUIET, **settings, **more}).fit(frame) for more in (ONE, {"tree_learner": "voting"})
    ]
    for model in found:
        aucs = [entry["validation_auc"] for entry in model.history]
        assert len(aucs) == int(np.argmax(aucs)) + 1 + 3 < 200
        assert (model.predict(frame)["prediction"] == frame.target).mean() > 0.95
    one, voting = (min(entry["validation_binary_logloss"] for entry in model.history) for model in found)
    assert voting == pytest.approx(one, abs=0.05)


def test_groups_stay_whole_on_a_rank() -> None:
    draw = np.random.default_rng(3)
    frame = pd.DataFrame({"q": draw.integers(0, 60, 900), "a": draw.normal(size=900), "b": draw.normal(size=900)})
    frame["grade"] = np.digitize(frame.a + frame.b / 2, [-0.5, 0.7, 1.4])
    settings: dict[str, Any] = {"feature_cols": ["a", "b"], "label_cols": "grade", "group_col": "q", **QUIET}
    settings |= {"native_params": NATIVE, "eval_at": [3]}
    one, two = (LightGBMRanker(**settings | more).fit(frame) for more in (ONE, {}))
    assert two.history[-1]["ndcg@3"] == pytest.approx(one.history[-1]["ndcg@3"], abs=0.01)
    ndcg = [_ndcg(part.grade.to_numpy(), two.predict(part)) for _, part in frame.groupby("q")]
    assert two.history[-1]["ndcg@3"] == pytest.approx(np.mean(ndcg), rel=1e-6), "a mean over whole groups, exactly"
    with pytest.raises(EmptyShard, match=r"Rank 1 of 2 received no rows .* all rows of a group are on one rank"):
        LightGBMRanker(**settings).fit(frame.assign(q=7))


def _ndcg(grades: np.ndarray, scores: np.ndarray) -> float:
    discount = 1 / np.log2(np.arange(2, 5))
    gain = 2.0**grades - 1
    best = (np.sort(gain)[::-1][:3] * discount).sum()
    return float((gain[np.argsort(-scores, kind="stable")][:3] * discount).sum() / best) if best else 1.0


def test_bins_are_those_of_a_sample_that_does_not_depend_on_the_ranks() -> None:
    frame = rows()
    native = {**NATIVE, "bin_construct_sample_cnt": 200}
    one, two = (regressor(native_params=native, num_iterations=1, **more).fit(frame) for more in (ONE, {}))
    infos = [
        next(line for line in model.booster().model_to_string().splitlines() if line.startswith("feature_infos"))
        for model in (one, two)
    ]
    assert infos[0] == infos[1]

    def with_bins_of_lightgbm(settings: Any) -> Any:
        bins._MOST_SAMPLE_BYTES = 0  # as if the sample were too large to be sent to every rank
        found = train(settings, False, None)
        return None if found is None else found["history"]

    settings, gang = regressor(num_iterations=20).settings()
    plan = prepare(LightGBMBackend(), frame, settings, gang)
    history, none = launch.start(with_bins_of_lightgbm, plan.gang, args=(plan.settings,), data=plan.data).result()
    assert none is None
    assert history[-1]["l2"] == pytest.approx(regressor(**ONE).fit(frame).history[-1]["l2"], rel=0.2)

    assert bins.is_shared({}, 64, [500_000] * 4)
    assert not bins.is_shared({}, 1000, [500_000] * 4)
    assert bins.is_shared({}, 1000, [500_000])
