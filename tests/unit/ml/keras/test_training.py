"""KerasEstimator on ranks: two learn what one process learns, and continue after a SIGKILL, on each back end."""

from __future__ import annotations

import functools
import os
import signal
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pandas as pd
import pytest

import tritium as tr
from tritium.errors import TrainingDiverged
from tritium.ml import EarlyStopping, KerasEstimator

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings(
        "ignore:__array__ implementation:DeprecationWarning"
    ),  # Keras 3.15's variables, on torch
]
ROWS = 103
QUIET: dict[str, Any] = {"progress": False, "output": "none", "verbose": False}
TIMES = ("seconds", "rows_per_second", "rows_padded")


def frame() -> pd.DataFrame:
    draw = np.random.default_rng(0)
    rows = pd.DataFrame({f"x{i}": draw.normal(size=ROWS) for i in range(4)})
    rows["y"] = rows.x0 * 2 - rows.x1
    rows["c"] = (rows.y > 0).astype(int) + (rows.y > 1)
    rows["w"] = draw.uniform(0.1, 3, ROWS)
    rows["held"] = np.arange(ROWS) % 25 == 3  # 98 to train on, of which the ranks have 49 each, or 50 and 48
    return rows


def two_heads() -> Any:
    """Return a model whose weights are the same on every back end."""
    a, b = keras.layers.Input((2,), name="a"), keras.layers.Input((2,), name="b")
    both = keras.layers.Concatenate()([a, b])
    hidden = keras.layers.Dense(8, "tanh", kernel_regularizer=keras.regularizers.L2(0.01), name="hidden")(both)
    outputs = [keras.layers.Dense(1, name="y")(hidden), keras.layers.Dense(3, "softmax", name="c")(hidden)]
    model = keras.Model([a, b], outputs)
    draw = np.random.default_rng(1)
    model.set_weights([draw.normal(0, 0.3, each.shape) for each in model.get_weights()])
    return model


class Dies(keras.callbacks.Callback):  # type: ignore[misc]
    """A callback that kills the last rank once, in the middle of an epoch."""

    def __init__(self, mark: str) -> None:
        super().__init__()
        self.mark, self.epoch = mark, -1

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        world = tr.world()
        if (self.epoch, batch) == (1, 3) and world.rank == world.size - 1 and not os.path.exists(self.mark):
            Path(self.mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)


def heads(**changes: Any) -> Any:
    settings: dict[str, Any] = {
        "model": two_heads,
        "optimizer": keras.optimizers.Adam(0.02),
        "loss": {"y": "mse", "c": "sparse_categorical_crossentropy"},
        "loss_weights": {"y": 0.5, "c": 2.0},
        "metrics": {"y": ["mae"], "c": ["accuracy"]},
        "feature_cols": {"a": ["x0", "x1"], "b": ["x2", "x3"]},
        "label_cols": {"y": ["y"], "c": "c"},
        "weight_col": "w",
        "epochs": 3,
        "shuffle": False,
        "validation": "held",
        "checkpoint_every": 2,
    }
    return KerasEstimator(**(settings | QUIET | changes)).fit(frame())


@functools.cache
def alone() -> Any:
    return heads(on="here", global_batch_size=16)


@pytest.mark.parametrize("backend", ["torch", "jax", "tensorflow"])
def test_two_ranks_of_which_one_is_killed_learn_what_one_process_learns(backend: str, tmp_path: Path) -> None:
    mark = str(tmp_path / "mark")
    ranks: dict[str, Any] = {"on": "driver", "ranks": 2, "global_batch_size": 16, "retries": 1}
    two = heads(**ranks, backend=backend, callbacks=[Dies(mark)])
    assert os.path.exists(mark)
    one = alone()
    for mine, theirs in zip(one.keras().get_weights(), two.keras().get_weights(), strict=True):
        np.testing.assert_allclose(theirs, mine, rtol=1e-5, atol=2e-6)
    assert [set(entry) for entry in one.history] == [set(entry) for entry in two.history]
    for entry, other in zip(one.history, two.history, strict=True):
        for name in set(entry) - set(TIMES):
            assert other[name] == pytest.approx(entry[name], rel=2e-5), name
    assert {"loss", "y_mae", "c_accuracy", "validation_loss", "learning_rate"} <= set(one.history[-1])
    assert [output.name for output in two.signature.outputs] == ["y", "c"]
    assert two.model.engine.save(by_value=True).facts["backend"] == "torch", "what predicts here"


def noisy() -> Any:
    layers = keras.layers
    stack = [layers.Dense(8, "tanh"), layers.BatchNormalization(), layers.Dropout(0.2), layers.Dense(1)]
    return keras.Sequential([layers.Input((4,)), *stack])


class Logs(keras.callbacks.Callback):  # type: ignore[misc]
    """A callback that keeps its own calls in a file of its rank."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place

    def _say(self, text: str) -> None:
        with open(f"{self.place}/{tr.world().rank}.txt", "a") as file:
            file.write(text + "\n")

    def on_train_begin(self, logs: Any = None) -> None:
        self._say("begin")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._say(f"epoch {epoch} {sorted(logs)} {logs['loss']:.6f} {logs['val_loss']:.6f}")
        self.model.stop_training = tr.world().rank == 1 and epoch == 3

    def on_train_end(self, logs: Any = None) -> None:
        self._say(f"end {logs['loss']:.6f}")


def test_a_training_that_continues_is_an_undisturbed_one(tmp_path: Path) -> None:
    """Random numbers, statistics of each rank, averaged weights and what callbacks hold are those of before.

    Callbacks see the same logs on every rank, and those that write files write one.
    """

    def fit(place: Path) -> Any:
        plateau = keras.callbacks.ReduceLROnPlateau(monitor="val_loss", patience=1, factor=0.5, min_delta=10)
        best = keras.callbacks.EarlyStopping(patience=5, min_delta=0.01, restore_best_weights=True)
        falling = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9)
        saver = keras.callbacks.ModelCheckpoint(str(place / "{epoch}.keras"))
        estimator = KerasEstimator(
            model=noisy,
            optimizer=keras.optimizers.Adam(0.02, use_ema=True),
            loss="mse",
            metrics=[keras.metrics.RootMeanSquaredError(name="rmse")],
            feature_cols=["x0", "x1", "x2", "x3"],
            label_cols="y",
            epochs=6,
            batch_size=8,
            validation="held",
            checkpoint_every=2,
            early_stopping=EarlyStopping(patience=5, restore_best=False),
            callbacks=[Dies(str(place / "killed")), plateau, falling, best, saver, Logs(str(place))],
            **QUIET | {"on": "driver", "ranks": 2, "retries": 1},
        )
        return estimator.fit(frame())

    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    (whole / "killed").touch()
    one, other = fit(whole), fit(broken)
    assert (broken / "killed").exists()
    assert one.history[-1]["learning_rate"] < 0.02
    for entry, again in zip(one.history, other.history, strict=True):
        for name in set(entry) - set(TIMES):
            assert again[name] == pytest.approx(entry[name], rel=1e-5), name
    for mine, theirs in zip(one.keras().get_weights(), other.keras().get_weights(), strict=True):
        np.testing.assert_allclose(theirs, mine, rtol=1e-5, atol=1e-7)
    texts = [(whole / f"{rank}.txt").read_text().splitlines() for rank in range(2)]
    assert texts[0] == texts[1]
    assert [line.split()[0] for line in texts[0]] == ["begin", "epoch", "epoch", "epoch", "epoch", "end"]
    loss, later = one.history[1]["loss"], one.history[1]["validation_loss"]
    assert texts[0][2].startswith("epoch 1 ['learning_rate', 'loss', 'rmse', 'val_loss', 'val_rmse'] ")
    assert texts[0][2].endswith(f" {loss:.6f} {later:.6f}")
    assert sorted(file.name for file in whole.glob("*.keras")) == ["1.keras", "2.keras", "3.keras", "4.keras"]
    assert keras.saving.load_model(whole / "2.keras").count_params() == one.keras().count_params()


@pytest.mark.parametrize("backend", ["torch", "jax", "tensorflow"])
def test_a_metric_of_a_batch_is_averaged_over_rows(backend: str) -> None:
    def of_batch(label: Any, output: Any) -> Any:
        return keras.ops.mean(keras.ops.abs(label - output))

    settings: dict[str, Any] = {
        "model": noisy,
        "optimizer": "sgd",
        "loss": "mse",
        "metrics": ["mae", of_batch],
        **QUIET,
    }
    settings |= {"feature_cols": ["x0", "x1", "x2", "x3"], "label_cols": ["y"], "weight_col": "same"}
    rows = frame().assign(same=2.0)[:98]
    place: dict[str, Any] = {"on": "here"} if backend == "torch" else {"on": "driver", "ranks": 1, "backend": backend}
    entry = KerasEstimator(**settings, batch_size=14, **place).fit(rows).history[-1]
    assert entry["of_batch"] == pytest.approx(entry["mae"], rel=1e-5)
    entry = KerasEstimator(**settings, batch_size=40, **place).fit(rows).history[-1]  # a third batch of 18 rows
    assert entry["of_batch"] == pytest.approx(entry["mae"], rel=0.5)


def test_a_class_without_a_score_and_a_loss_that_is_no_number() -> None:
    wrong = frame()
    wrong.loc[40, "c"] = 3
    settings: dict[str, Any] = {"feature_cols": ["x0", "x1", "x2", "x3"], "optimizer": "sgd", **QUIET}
    scores = [keras.layers.Input((4,)), keras.layers.Dense(3, "softmax")]
    classes: dict[str, Any] = {"model": keras.Sequential(scores), "loss": "sparse_categorical_crossentropy"}
    with pytest.raises(tr.errors.BadRow, match=r"label column 'c' holds the class 3, and the model gives 3 scores"):
        KerasEstimator(**settings, **classes, label_cols="c", on="here").fit(wrong)
    wild = keras.optimizers.SGD(1e30)
    with pytest.raises(TrainingDiverged, match=r"The loss is NaN or infinite: epoch \d, step"):
        KerasEstimator(**{**settings, "optimizer": wild}, model=noisy, loss="mse", label_cols=["y"], on="here").fit(
            wrong
        )
