"""The Keras estimator of `horovod.spark`, trained in this process from Parquet, without a JVM."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import settled

keras = settled.keras_on_torch()

from tritium.compat.horovod.spark.common.store import Store  # noqa: E402
from tritium.compat.horovod.spark.keras import KerasEstimator, KerasModel  # noqa: E402
from tritium.compat.horovod.spark.keras.models import model_of  # noqa: E402
from tritium.errors import BadSetting  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn")  # Keras on NumPy 2.4


@pytest.fixture(scope="module", autouse=True)
def _keras_settled() -> None:
    settled.settle_keras()


@pytest.fixture(autouse=True)
def _names() -> None:
    importlib.import_module("tritium.compat")


def halved(x: Any) -> Any:
    return x * 0.5


def network() -> Any:
    x, kind = keras.Input((2,), name="x"), keras.Input((1,), name="kind")
    embedded = keras.layers.Flatten()(keras.layers.Embedding(2, 3)(kind))
    hidden = keras.layers.Dense(4, activation=halved)(keras.layers.Concatenate()([x, embedded]))
    return keras.Model([x, kind], keras.layers.Dense(1)(hidden))


def test_the_best_epoch_is_the_model_and_a_run_id_continues(tmp_path: Path) -> None:
    store, x = Store.create(str(tmp_path)), np.random.default_rng(0).uniform(-1, 1, (32, 2))
    table = pa.table({"x": list(x), "kind": (x[:, 0] > 0).astype(int), "y": 3 * x[:, 0] - x[:, 1]})
    pq.write_table(table, tmp_path / "rows.parquet")
    parquet = dict.fromkeys(("train", "validation"), f"file://{tmp_path}/rows.parquet")
    one = KerasEstimator(
        store=store,
        model=network(),
        optimizer=keras.optimizers.Adam(0.01),
        loss="mae",
        metrics=["mse"],
        custom_objects={"halved": halved},
        feature_cols=["x", "kind"],
        label_cols=["y"],
        validation=0.5,
        batch_size=8,
        epochs=2,
        verbose=0,
        checkpoint_callback=keras.callbacks.ModelCheckpoint("any.keras", monitor="val_loss", save_best_only=True),
    )
    one._check(["x", "kind", "y"])
    result = one._training({}, store, "one", None, parquet)(*one._arguments("one", {}))
    history, size = result[0], result[3]
    assert (set(history), len(history["loss"]), size) == ({"loss", "mse", "val_loss", "val_mse"}, 2, 1)
    model = one._made(result, "one", {})
    assert float(keras.ops.convert_to_numpy(model.getModel().optimizer.learning_rate)) == pytest.approx(0.01)
    scoring = model_of(model.getModel(), ["x", "kind"], [2, None], 1, {"halved": halved})
    predicted = scoring.predict({"x0": x.astype("float32"), "x1": np.asarray(table["kind"]).astype("float32")})
    direct = model.getModel().predict([x.astype("float32"), np.asarray(table["kind"])[:, None]], verbose=0)[:, 0]
    assert predicted == pytest.approx(direct, rel=1e-4)
    assert np.abs(predicted - np.asarray(table["y"])).mean() == pytest.approx(min(history["val_loss"]), rel=1e-3)
    text = model._saved_value("model", model.getModel())
    again = KerasModel._loaded_value("model", text, {}.get)
    assert np.array_equal(again.get_weights()[0], model.getModel().get_weights()[0])
    assert one._arguments("one", {})[3] is True
    assert one._arguments("two", {})[3] is False


def test_models_that_do_not_fit_the_columns_are_refused(tmp_path: Path) -> None:
    store = Store.create(str(tmp_path))
    one = KerasEstimator(
        store=store, model=network(), optimizer="adam", loss="mae", feature_cols=["x"], label_cols=["y"]
    )
    with pytest.raises(BadSetting, match="Feature column count 1 must equal model inputs count 2"):
        one._check(["x", "y"])
    with pytest.raises(BadSetting, match=r"model has to be an instance of keras.Model"):
        one.setModel(object())._check(["x", "y"])
    with pytest.raises(BadSetting, match=r"data_module=…\): there are no Parquet files"):
        KerasEstimator(data_module=object)
