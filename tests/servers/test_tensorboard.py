"""Numbers of runs for TensorBoard, read back by TensorFlow's own reader, which verifies the checksums."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
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
HISTOGRAMS = """
import json, sys
import tensorflow as tf
for record in tf.data.TFRecordDataset(sys.argv[1]):
    event = tf.compat.v1.Event.FromString(record.numpy())
    for value in event.summary.value:
        if value.HasField("histo"):
            histo = value.histo
            facts = [histo.min, histo.max, histo.num, histo.sum, histo.sum_squares]
            print(json.dumps([value.tag, event.step, facts, list(histo.bucket_limit), list(histo.bucket)]))
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


def test_histograms(tmp_path: Path) -> None:
    draw = np.random.default_rng(3).normal(size=(50, 20))

    def train() -> None:
        arrays = {"layer": draw, "same": [2.0] * 4, "diverged": torch.tensor([float("nan"), float("inf")])}
        tr.world().log(step=0, steps=2, loss=0.5, histograms=arrays)
        half = torch.tensor([1.0, float("nan"), 3.0], dtype=torch.bfloat16, requires_grad=True)
        tr.world().log(step=1, histograms={"half": half, "close": np.array([1.0, np.nextafter(1.0, 2.0)])})

    with tritium.tensorboard.tracked(tmp_path):
        tr.launch(train, ranks=2, on="driver", progress=False)
    ((path,),) = (list(folder.iterdir()) for folder in tmp_path.iterdir())
    command = [sys.executable, "-c", HISTOGRAMS, str(path)]
    answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    read_back = {tag: facts for tag, *facts in map(json.loads, answer.stdout.splitlines())}
    assert read_back.keys() == {"layer", "same", "half", "close"}
    step, facts, limits, counts = read_back["layer"]
    expected, edges = np.histogram(draw, 30)
    assert (step, counts) == (0, expected.tolist())
    assert limits == pytest.approx(edges[1:])
    assert facts == pytest.approx([draw.min(), draw.max(), 1000, draw.sum(), (draw**2).sum()])
    assert read_back["same"][1] == [2.0, 2.0, 4.0, 8.0, 16.0]
    step, facts, _, counts = read_back["half"]
    assert (step, facts, counts[0], counts[-1]) == (1, [1.0, 3.0, 2.0, 4.0, 10.0], 1.0, 1.0)
    assert sum(read_back["close"][3]) == 2
    assert read(path.parent)["loss"] == [(0, 0.5)]


def test_a_histogram_of_words_is_refused() -> None:
    def train() -> None:
        tr.world().log(histograms={"words": ["a", "b"]})

    with pytest.raises(BadSetting, match=r"takes arrays of numbers in histograms=: 'words' is of list"):
        tr.launch(train, on="here", progress=False)


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
