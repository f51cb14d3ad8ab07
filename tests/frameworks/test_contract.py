"""What every framework promises under `launch`, on two executors: each file in `cases` is one framework.

A case trains the linear model `x @ w + b` from zeros on the rows of a DataFrame: STEPS steps of gradient descent on the
mean squared error of all rows, with the learning rate RATE. NumPy does the same in this process.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tritium as tr
from cases import case_of
from tritium.errors import RankFailed

ROWS, WIDTH = 256, 4
STEPS, RATE = 20, 0.1
CASES = sorted(path.stem for path in Path(__file__).parent.joinpath("cases").glob("*.py"))
pytestmark = [
    pytest.mark.parametrize("cluster", ["local-cluster"], indirect=True),
    pytest.mark.timeout(400),  # three starts, and an import of TensorFlow takes two ranks on two cores 10 s
]

Train = Callable[[Callable[[int], None]], dict[str, Any]]


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Any:
    """The module of one framework: `FRAMEWORK`, the setting; `ENV`; `train(on_step)` → rank, size and weights."""
    return case_of("frameworks", request.param)


def frame(spark: Any) -> Any:
    x = [f"cast(cos(id * {i + 1}) as float)" for i in range(WIDTH)]
    y = "cast(2 * cos(id) - cos(id * 3) + 0.5 as float)"
    return spark.range(0, ROWS, 1, 2).selectExpr(f"array({', '.join(x)}) as x", f"{y} as y")


def table() -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of `frame` as x (ROWS, WIDTH) and y (ROWS), in float64."""
    ids = np.arange(ROWS)
    x = np.stack([np.cos(ids * (i + 1)) for i in range(WIDTH)], axis=1)
    return x, 2 * np.cos(ids) - np.cos(ids * 3) + 0.5


@functools.cache
def alone() -> np.ndarray:
    """Return the weights and the bias that one process learns."""
    x, y = table()
    x = np.concatenate([x, np.ones((ROWS, 1))], axis=1)
    w = np.zeros(WIDTH + 1)
    for _ in range(STEPS):
        w -= RATE * 2 * x.T @ (x @ w - y) / ROWS
    return w


def launch(cluster: Any, case: Any, train: Callable[[], Any], **settings: Any) -> list[Any]:
    quiet = {"ranks": 2, "progress": False, "output": "none", "start_timeout": 150, "retries": 0}
    data = {"train": frame(cluster.spark)}
    settings = {**quiet, "framework": case.FRAMEWORK, "env": case.ENV, "data": data, **settings}
    return tr.launch(train, spark=cluster.spark, **settings)


def check(found: list[Any]) -> None:
    assert [(each["rank"], each["size"]) for each in found] == [(0, 2), (1, 2)]
    for each in found:
        np.testing.assert_allclose(each["weights"], alone(), rtol=2e-5, atol=1e-6)


def test_one_launch_after_another_in_one_session(cluster: Any, case: Any, tmp_path: Path) -> None:
    """It raises a rank's own exception, and then learns what one process learns, tried again after a killed rank."""

    def raises(step: int) -> None:
        if step == 2 and tr.world().rank == 1:
            raise ValueError("the user's own")

    with pytest.raises(RankFailed, match=r"Rank 1 .* raised ValueError: the user's own") as caught:
        launch(cluster, case, functools.partial(case.train, raises))
    assert isinstance(caught.value.__cause__, ValueError)
    before = str(tmp_path / "killed")

    def kills(step: int) -> None:
        if step == 2 and tr.world().rank == 1 and not os.path.exists(before):
            Path(before).touch()
            os.kill(os.getpid(), signal.SIGKILL)

    check(launch(cluster, case, functools.partial(case.train, kills), retries=1))
    assert os.path.exists(before)
