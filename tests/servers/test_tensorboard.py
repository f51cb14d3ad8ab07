"""Numbers of runs for TensorBoard, read back by TensorFlow's own reader, which verifies the checksums."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch

import tritium as tr
import tritium.tensorboard
from tritium.errors import BadSetting, RankFailed
from tritium.ml import fit

READER = """
import json, sys
import tensorflow as tf
for record in tf.data.TFRecordDataset(sys.argv[1]):
    event = tf.compat.v1.Event.FromString(record.numpy())
    values = [[value.tag, repr(value.simple_value)] for value in event.summary.value]
    print(json.dumps([event.wall_time, event.step, event.file_version, values]))
"""


def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the scalars of the one event file in a folder: name → (step, value)."""
    (path,) = folder.iterdir()
    answer = subprocess.run([sys.executable, "-c", READER, str(path)], stdout=subprocess.PIPE, text=True, check=True)
    (_, _, version, none), *events = map(json.loads, answer.stdout.splitlines())
    assert (version, none) == ("brain.Event:2", [])
    scalars: dict[str, list[tuple[int, float]]] = {}
    for moment, step, _, values in events:
        assert moment > 1.7e9
        for name, value in values:
            scalars.setdefault(name, []).append((step, float(value)))
    return scalars


def log(fails: bool) -> None:
    world = tr.world()
    for epoch in range(2):
        for step in range(3):
            world.log(epoch=epoch, step=step, steps=3, loss=1.0 / (1 + step), rank=world.rank)
    world.log(odd=float("nan"), large=1e300, Ünicode=-2.5)
    if fails:
        raise ValueError("it was to fail")


@pytest.mark.parametrize("fails", [False, True])
def test_what_rank_0_logs_is_read_back(tmp_path: Path, fails: bool) -> None:
    board = tmp_path / "board"
    with tritium.tensorboard.tracked(board):
        if fails:
            with pytest.raises(RankFailed):
                tr.launch(log, ranks=2, args=(True,), on="driver", progress=False)
        else:
            tr.launch(log, ranks=2, args=(False,), on="driver", progress=False)
            tr.launch(log, ranks=1, args=(False,), on="driver", progress=False)
    folders = sorted(board.iterdir())
    assert len(folders) == (1 if fails else 2)
    for folder in folders:
        scalars = read(folder)
        assert scalars["loss"] == [(number, pytest.approx(1.0 / (1 + number % 3))) for number in range(6)]
        assert {value for _, value in scalars["rank"]} == {0.0}
        assert math.isnan(scalars["odd"][0][1])
        assert scalars["large"] == [(0, math.inf)]
        assert scalars["Ünicode"] == [(0, -2.5)]


def test_an_estimators_history_is_on_the_board(tmp_path: Path) -> None:
    rows = pd.DataFrame({"x": [0.1 * i for i in range(64)], "y": [0.2 * i for i in range(64)]})
    with tritium.tensorboard.tracked(tmp_path / "board"):
        model = fit(
            rows, model=torch.nn.Linear(1, 1), loss=torch.nn.MSELoss(), feature_cols=["x"], label_cols=["y"],
            optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.1), epochs=3, on="driver",
        )  # fmt: skip
    (folder,) = (tmp_path / "board").iterdir()
    scalars = read(folder)
    epochs = [{name: value for name, value in entry.items() if name in scalars} for entry in model.history]
    assert epochs[0], (scalars, model.history)
    for name, value in epochs[-1].items():
        assert scalars[name][-1][1] == pytest.approx(value, rel=1e-6)


def test_it_imports_neither_tensorflow_nor_tensorboard() -> None:
    heavy = ("tensorflow", "tensorboard", "torch")
    code = f"import sys, tritium.tensorboard; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_url_is_refused() -> None:
    with (
        pytest.raises(BadSetting, match="writes to a local directory"),
        tritium.tensorboard.tracked("s3://bucket/board"),
    ):
        raise AssertionError
