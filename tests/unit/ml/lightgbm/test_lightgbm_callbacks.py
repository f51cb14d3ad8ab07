"""LightGBM's own callbacks in the ranks: what they see, what they may change, and how they end a training."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import pytest
from lightgbm.callback import CallbackEnv, EarlyStopException
from tests.unit.ml.lightgbm.test_lightgbm_ranks import ONE, regressor, rows

import tritium as tr
from tritium.errors import BadSetting, RankFailed
from tritium.ml import Callback

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


def best_at(env: CallbackEnv, iteration: int) -> None:
    """End the training; the model is that of `iteration`, from 0."""
    raise EarlyStopException(iteration, env.evaluation_result_list)


def test_learning_rates_are_reset_as_by_lightgbm() -> None:
    rates = [0.3 * 0.9**i for i in range(20)]
    frame = rows()
    reset = lightgbm.reset_parameter(learning_rate=rates)
    model = regressor(callbacks=[reset], **ONE).fit(frame)
    x, y = frame.drop(columns="target").to_numpy(np.float32), frame.target
    params = {"objective": "regression", "verbosity": -1, "seed": 0, "num_threads": 1}
    plain = lightgbm.train(
        params, lightgbm.Dataset(x, y), 20, callbacks=[lightgbm.reset_parameter(learning_rate=rates)]
    )
    np.testing.assert_array_equal(model.predict(frame), plain.predict(x))
    two = regressor(callbacks=[reset]).fit(frame)
    np.testing.assert_allclose(two.predict(frame), model.predict(frame), rtol=1e-4)


def test_every_rank_calls_them_in_their_order_with_the_metrics_of_all_rows(tmp_path: Path) -> None:
    class Writes:
        def __init__(self, name: str, order: int, before: bool = False) -> None:
            self.name, self.order, self.before_iteration = name, order, before

        def __call__(self, env: CallbackEnv) -> None:
            found = [] if env.evaluation_result_list is None else [tuple(r)[:4] for r in env.evaluation_result_list]
            with (tmp_path / f"rank-{tr.world().rank}").open("a") as file:
                print(repr((self.name, env.iteration, env.end_iteration, found)), file=file)

    model = regressor(
        callbacks=[Writes("last", 9), Writes("first", 1), Writes("before", 0, before=True)],
        num_iterations=3,
        validation=0.2,
    ).fit(rows())
    seen = [[ast.literal_eval(line) for line in (tmp_path / f"rank-{r}").read_text().splitlines()] for r in (0, 1)]
    assert seen[0] == seen[1]
    assert [(name, i) for name, i, *_ in seen[0]] == [(n, i) for i in range(3) for n in ("before", "first", "last")]
    for name, i, end, found in seen[0]:
        entry = model.history[i]
        metrics = [("training", "l2", entry["l2"], False), ("validation", "l2", entry["validation_l2"], False)]
        assert (end, found) == (3, [] if name == "before" else metrics)


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_ends_the_training_of_all(rank: int, tmp_path: Path) -> None:
    def ends(env: CallbackEnv) -> None:
        if env.iteration == 6 and tr.world().rank == rank:
            best_at(env, 4)

    frame, run_dir = rows(), str(tmp_path)
    model = regressor(callbacks=[ends], run_dir=run_dir).fit(frame)
    assert (len(model.history), model.booster().num_trees()) == (7, 5)
    shorter = regressor(num_iterations=5).fit(frame)
    np.testing.assert_allclose(model.predict(frame), shorter.predict(frame), rtol=1e-12)
    again = regressor(run_dir=run_dir, num_iterations=30).fit(frame)
    assert again.booster().num_trees() == 5, "a training that a callback has ended does not continue"


def test_an_exception_in_one_is_the_users_error() -> None:
    def fails(env: CallbackEnv) -> None:
        if env.iteration == 2 and tr.world().rank == 1:
            raise KeyError("no such metric")

    with pytest.raises(RankFailed, match="KeyError: 'no such metric'") as caught:
        regressor(callbacks=[fails], retries=0).fit(rows())
    assert caught.value.rank == 1


def test_log_evaluation_writes_in_one_rank(capfd: pytest.CaptureFixture[str]) -> None:
    regressor(callbacks=[lightgbm.log_evaluation(10)], output="all").fit(rows())
    out, err = capfd.readouterr()
    assert (out + err).count("[20]\ttraining's l2: ") == 1, out + err


def test_lightgbm_writes_nothing_but_with_a_verbosity(capfd: pytest.CaptureFixture[str]) -> None:
    regressor(output="all", num_iterations=2).fit(rows())
    out, err = capfd.readouterr()
    assert "[LightGBM]" not in out + err
    regressor(output="all", num_iterations=2, native_params={"num_threads": 1, "verbose": 1}).fit(rows())
    out, err = capfd.readouterr()
    wrote = [line for line in (out + err).splitlines() if "[LightGBM]" in line]
    assert any("Connected to rank 1" in line for line in wrote)
    assert all(line.startswith("[rank ") for line in wrote), "the trial on the driver writes nothing"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (lightgbm.log_evaluation(), "must be a list: callbacks=[…]."),
        ([lightgbm.early_stopping(5, verbose=False)], "Give the setting early_stopping=."),
        ([lightgbm.record_evaluation({})], "Read model.history instead."),
        ([Callback()], "can't be called; LightGBM's are functions of a CallbackEnv."),
        ([Callback], "the callback Callback is a class; give an instance, Callback()."),
        ([lambda env, rank: None], "the callback <lambda> takes env, rank; it is called with (env)"),
    ],
    ids=["not-a-list", "early-stopping", "record", "tritium", "class", "arguments"],
)
def test_what_is_no_callback_of_lightgbm_is_refused(given: Any, says: str) -> None:
    with pytest.raises(BadSetting) as caught:
        regressor(callbacks=given, **ONE).fit(rows())
    assert says in str(caught.value)
