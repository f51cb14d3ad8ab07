"""`framework="lightgbm"`: every training is one of all ranks, and a port that was taken is no failure."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import time
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import pandas as pd
import pytest

import tritium as tr
from machines import can_make_hosts, run_on_hosts
from tritium.errors import BadSetting, RankFailed
from tritium.frameworks.lightgbm import LightGBM

X = np.random.default_rng(0).uniform(-1, 1, (3000, 4))
Y = 2 * X[:, 0] + np.sin(3 * X[:, 1])
POINTS = np.random.default_rng(1).uniform(-1, 1, (200, 4))
ROWS = pd.DataFrame({"x": list(X), "y": Y})
PARAMS = {"objective": "regression", "num_leaves": 15, "num_threads": 1, "verbose": -1}


def run(fn: Any, **settings: Any) -> list[Any]:
    quiet = {"ranks": 2, "on": "driver", "progress": False, "output": "none", "data": {"train": ROWS}, "retries": 0}
    return tr.launch(fn, **{**quiet, "framework": "lightgbm", **settings})


def own_rows() -> tuple[Any, Any]:
    shard = tr.world().shard("train")
    [rows] = next(shard.epochs(1, batch_size=max(shard.counts), shuffle=False, device=None))
    return rows["x"], rows["y"]


def trained(**settings: Any) -> Any:
    return lightgbm.train(PARAMS, lightgbm.Dataset(*own_rows()), 20, **settings).predict(POINTS)


def test_every_training_is_of_all_ranks() -> None:
    def train() -> dict[str, Any]:
        world, (x, y) = tr.world(), own_rows()
        stopped = lightgbm.train(
            {**PARAMS, "tree": "voting"},
            data := lightgbm.Dataset(x, y),
            300,
            valid_sets=[data.create_valid(x[: 50 + 100 * world.rank], y[: 50 + 100 * world.rank])],
            callbacks=[lightgbm.early_stopping(3, min_delta=0.003, verbose=False)],
        )
        alone = lightgbm.train({**PARAMS, "tree_learner": "serial"}, lightgbm.Dataset(x, y), 5)
        regressor = lightgbm.LGBMRegressor(n_estimators=20, num_leaves=15, n_jobs=1, verbose=-1).fit(x, y)
        return {
            "rank": (world.rank, world.size),
            "trained": trained(),
            "learner": regressor.booster_.params["tree_learner"],
            "regressor": regressor.predict(POINTS),
            "stopped": (stopped.num_trees(), stopped.best_score["valid_0"]["l2"], stopped.params["tree_learner"]),
            "alone": alone.predict(POINTS),
        }

    for _ in range(2):
        found = run(train, ranks=3)
    one = lightgbm.train(PARAMS, lightgbm.Dataset(X, Y), 20).predict(POINTS)
    assert [each["rank"] for each in found] == [(0, 3), (1, 3), (2, 3)]
    for each in found:
        np.testing.assert_array_equal(each["trained"], found[0]["trained"])
        np.testing.assert_array_equal(each["regressor"], found[0]["trained"])
        assert each["stopped"] == found[0]["stopped"]
        assert each["learner"] == "data"
    assert np.abs(found[0]["trained"] - one).mean() < 0.05
    assert found[0]["stopped"][0] < 300
    assert found[0]["stopped"][2] == "voting"
    assert (found[0]["alone"] != found[1]["alone"]).any()


@pytest.mark.parametrize("verbosity", [None, -1, 1])
def test_of_the_connection_lightgbm_writes_only_if_asked(
    verbosity: int | None, capfd: pytest.CaptureFixture[str]
) -> None:
    def train() -> None:
        given = {} if verbosity is None else {"verbosity": verbosity}
        lightgbm.train({"objective": "regression", "num_threads": 1, **given}, lightgbm.Dataset(*own_rows()), 2)

    run(train, output="all")
    out, err = capfd.readouterr()
    connecting = ("Listening", "Trying to bind", "Connected to rank", "Finished linking")
    assert [text in out + err for text in connecting] == [False, verbosity == 1, verbosity == 1, False]
    assert ("Start training from score" in out + err) == (verbosity != -1), "all else as LightGBM alone"


def test_the_exception_of_a_rank_is_raised() -> None:
    def train() -> None:
        def raises(env: Any) -> None:
            if env.iteration == 3 and tr.world().rank == 1:
                raise ValueError("the user's own")

        trained(callbacks=[raises])

    with pytest.raises(RankFailed, match=r"Rank 1 .* raised ValueError: the user's own"):
        run(train)


def test_a_rank_that_is_killed_is_tried_again(tmp_path: Path) -> None:
    def train() -> Any:
        def kills(env: Any) -> None:
            if env.iteration == 3 and tr.world().rank == 1 and not (tmp_path / "killed").exists():
                (tmp_path / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)

        return trained(callbacks=[kills])

    one, other = run(train, retries=1)
    np.testing.assert_array_equal(one, other)
    assert (tmp_path / "killed").exists()


@pytest.mark.parametrize("unlucky", range(3))
def test_a_port_that_was_taken_meanwhile_is_tried_again(unlucky: int) -> None:
    with socket.socket() as other:  # of this process: a rank looks which ports are its own
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]

        def train() -> int:
            from tritium.frameworks import lightgbm_network

            choose, chosen = lightgbm_network.free_port, []

            def free_port() -> int:
                taken = tr.world().rank == unlucky and not chosen
                chosen.append(port if taken else choose())
                return chosen[-1]

            lightgbm_network.free_port = free_port
            trained()
            return len(chosen)

        assert run(train, ranks=3) == [2, 2, 2]


def test_a_port_that_is_always_taken_is_the_error_of_lightgbm() -> None:
    def train() -> None:
        from tritium.frameworks import lightgbm_network

        with socket.socket() as other:
            other.bind(("", 0))
            if tr.world().rank == 0:
                lightgbm_network.free_port = lambda: other.getsockname()[1]
            trained()

    with pytest.raises((RankFailed, BadSetting), match="port"):
        run(train)


def test_what_would_not_be_one_training_is_refused_on_every_rank() -> None:
    def train() -> None:
        x, y = own_rows()
        data = lightgbm.Dataset(x, y).construct()
        with pytest.raises(BadSetting, match="constructed before the training"):
            lightgbm.train(PARAMS, data, 5)
        classes = {**PARAMS, "objective": "multiclass", "num_classes": 3 + tr.world().rank}
        with pytest.raises(BadSetting, match="num_class is 3 on rank 0 and 4 on rank 1"):
            lightgbm.train(classes, lightgbm.Dataset(x, (y > 0).astype(int)), 5)

    run(train)


def test_one_rank_needs_no_other() -> None:
    [found] = run(trained, ranks=1)
    np.testing.assert_array_equal(found, lightgbm.train(PARAMS, lightgbm.Dataset(X, Y), 20).predict(POINTS))


@pytest.mark.skipif(not can_make_hosts(), reason="only root may make network namespaces")
def test_ranks_on_two_hosts_train_one_model(tmp_path: Path) -> None:
    def train() -> None:
        rank = tr.world().rank
        found = lightgbm.train(PARAMS, lightgbm.Dataset(X[rank::2], Y[rank::2]), 20).predict(POINTS)
        np.save(tmp_path / f"{rank}.npy", found)

    run_on_hosts(train, framework=LightGBM())
    first, second = (np.load(tmp_path / f"{rank}.npy") for rank in range(2))
    np.testing.assert_array_equal(first, second)
    assert np.abs(first - lightgbm.train(PARAMS, lightgbm.Dataset(X, Y), 20).predict(POINTS)).mean() < 0.05


@pytest.mark.skipif(not can_make_hosts(), reason="only root may make network namespaces")
@pytest.mark.parametrize(
    ("cable", "address"), [("routed", r"10\.\d+\.\d+\.2 \(eth0\)"), ("own", r"10\.190\.0\.1 \(direct\)")]
)
def test_hosts_train_by_the_addresses_at_which_they_reach_each_other(tmp_path: Path, cable: Any, address: str) -> None:
    """The name of each stands for an address that the other can't reach; nor is it reached there from the driver."""

    def train() -> None:
        rank = tr.world().rank
        found = lightgbm.train(PARAMS, lightgbm.Dataset(X[rank::2], Y[rank::2]), 5).predict(POINTS)
        np.save(tmp_path / f"{rank}.npy", found)

    notes = run_on_hosts(train, framework=LightGBM(), known="192.0.2.7 {name}", cable=cable)
    first, second = (np.load(tmp_path / f"{rank}.npy") for rank in range(2))
    np.testing.assert_array_equal(first, second)
    assert [re.search(rf"hosts reach each other at: \S+ {address}", note) is not None for note in notes] == [True]


@pytest.mark.skipif(not can_make_hosts(), reason="only root may make network namespaces")
def test_hosts_that_do_not_reach_each_other_are_named() -> None:
    began = time.monotonic()
    with pytest.raises(BadSetting, match=r"host tritium-\S+ of rank 0 has the addresses 10\.\S+, and all other hosts"):
        run_on_hosts(lambda: trained(), framework=LightGBM(), cable=None)
    assert time.monotonic() - began < 30


def test_the_cores_of_a_task_are_its_threads() -> None:
    def most() -> int:
        found = ctypes.c_int()
        lightgbm.basic._safe_call(lightgbm.basic._LIB.LGBM_GetMaxThreads(ctypes.byref(found)))
        return found.value

    before = most()
    with LightGBM().threads(1):
        assert most() == 1
        with LightGBM().threads(None):
            assert most() == 1
    assert most() == before
