"""KerasEstimator in this process: what models, losses and custom objects it takes and refuses, and what is saved."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pandas as pd
import pytest
import torch

import tritium as tr
from tritium.errors import BadData, BadRow, BadSetting, ModelError, UntrustedModel
from tritium.ml import EarlyStopping, KerasEstimator, KerasSettings
from tritium.model.engines import keras_form
from tritium.model.engines.keras import KerasEngine

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
QUIET: dict[str, Any] = {"progress": False, "output": "none", "verbose": False, "on": "here"}
COLUMNS = ["x0", "x1", "x2"]


@pytest.fixture(scope="module")
def rows() -> pd.DataFrame:
    draw = np.random.default_rng(0)
    frame = pd.DataFrame({name: draw.normal(size=60).astype("float32") for name in COLUMNS})
    frame["y"] = frame.x0 - 2 * frame.x1
    frame["c"] = (frame.y > 0).astype(int)
    return frame


def double(x: Any) -> Any:
    return x * 2


def distance(y: Any, p: Any) -> Any:
    return abs(y - p)


class Scale(keras.layers.Layer):  # type: ignore[misc]
    """A layer of the user's own."""

    def __init__(self, by: float = 3.0, **options: Any) -> None:
        super().__init__(**options)
        self.by = by

    def call(self, x: Any) -> Any:
        return x * self.by

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "by": self.by}


class Applies(keras.layers.Layer):  # type: ignore[misc]
    """A layer in which a function can't be found by looking at its attributes."""

    def __init__(self, function: Any, **options: Any) -> None:
        super().__init__(**options)
        self.held = lambda: function

    def call(self, x: Any) -> Any:
        return self.held()(x)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "function": keras.saving.serialize_keras_object(self.held())}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        return cls(**{**config, "function": keras.saving.deserialize_keras_object(config["function"])})


class Subclassed(keras.Model):  # type: ignore[misc]
    """A model without a configuration."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.inner(x)


def dense(*layers: Any) -> Any:
    return keras.Sequential([keras.layers.Input((3,)), *layers, keras.layers.Dense(1)])


def fitted(rows: pd.DataFrame, **changes: Any) -> Any:
    settings = {"model": dense, "optimizer": "sgd", "loss": "mse", "feature_cols": COLUMNS, "label_cols": ["y"]}
    return KerasEstimator(**settings | QUIET | changes).fit(rows)


def test_a_model_of_keras_own_layers_is_loaded_without_trust(rows: pd.DataFrame, tmp_path: Path) -> None:
    model = fitted(
        rows, metrics=["mae"], validation=0.3, early_stopping=EarlyStopping(patience=1, monitor="mae"), epochs=4
    )
    model.model.save(str(tmp_path / "model"))
    again = tr.load(str(tmp_path / "model"))
    np.testing.assert_array_equal(again.predict(rows), model.predict(rows))
    assert again.history == model.history
    model.keras().save(tmp_path / "model.keras")
    other = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(other.predict(rows[COLUMNS].to_numpy(), verbose=0)[:, 0], model.predict(rows), rtol=1e-5)
    assert sorted(file.name for file in (tmp_path / "model").iterdir()) == [
        "history.json",
        "manifest.json",
        "model.safetensors",
        "signature.json",
    ]


def test_a_model_is_restored_on_a_device_as_executors_do() -> None:
    model = dense(keras.layers.Dropout(0.5), keras.layers.BatchNormalization())
    parts = KerasEngine(model).save(by_value=True)
    weights = bytearray(b"".join(parts.weights.stream()))
    assert parts.code == b""
    engine = KerasEngine.restore(weights, parts.facts, b"", device=KerasEngine.task_device("cpu", []))
    batch = {"x": np.ones((5, 3), np.float32)}
    found = engine.call(batch, ["prediction"])["prediction"]
    np.testing.assert_allclose(found, model.predict_on_batch(batch["x"]), rtol=1e-6)
    with pytest.raises(BadSetting, match="Keras sees 0 GPU"):
        KerasEngine.task_device("cuda", [])
    with pytest.raises(BadSetting, match="none of Keras's devices"):
        KerasEngine.check_device("tpu")


@pytest.mark.usefixtures("saved_elsewhere")
def test_a_configuration_needs_trust_where_keras_runs_code_that_it_names(
    rows: pd.DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitted(rows, model=dense()).model.save(str(tmp_path / "model"))
    tr.load(str(tmp_path / "model"))
    for version in ("3.8.0", "3.11.3"):
        monkeypatch.setattr(keras, "__version__", version)
        with pytest.raises(UntrustedModel, match=rf"made by Keras {re.escape(version)}, which runs code"):
            tr.load(str(tmp_path / "model"))
    tr.load(str(tmp_path / "model"), trusted=True)


@pytest.mark.parametrize("kind", ["layers", "lambda", "subclassed"])
@pytest.mark.usefixtures("saved_elsewhere")
def test_code_of_the_user_travels_by_value_and_needs_trust(rows: pd.DataFrame, tmp_path: Path, kind: str) -> None:
    models = {
        "layers": dense(keras.layers.Dense(4, activation=double), Scale(2.0)),
        "lambda": dense(keras.layers.Lambda(lambda x: x + 1)),
        "subclassed": Subclassed,
    }
    model = fitted(rows, model=models[kind])
    model.model.save(str(tmp_path / "model"))
    with pytest.raises(UntrustedModel, match="holds its code by value"):
        tr.load(str(tmp_path / "model"))
    again = tr.load(str(tmp_path / "model"), trusted=True)
    np.testing.assert_array_equal(again.predict(rows), model.predict(rows))
    again.save(str(tmp_path / "again"))
    np.testing.assert_array_equal(tr.load(str(tmp_path / "again"), trusted=True).predict(rows), model.predict(rows))


def test_custom_objects_that_are_missing(rows: pd.DataFrame) -> None:
    form = keras_form.form_of(dense(Scale()))
    with pytest.raises(ModelError, match=r"holds 'Scale', a class or function of its own .* custom_objects="):
        dataclasses.replace(form, objects={}).model()
    hidden = dense(Applies(double))
    with pytest.raises(BadSetting, match=r"the function 'double', .* can't be found .* custom_objects={'double': …}"):
        fitted(rows, model=hidden)
    fitted(rows, model=hidden, custom_objects={"double": double})


def test_what_a_model_within_a_model_was_compiled_with_is_not_needed_to_predict() -> None:
    inner = dense(Scale())
    inner.compile("sgd", "mse", metrics=[distance])
    inputs = keras.Input(inner.input_shape[1:])
    form = keras_form.form_of(keras.Model(inputs, inner(inputs)))
    assert len(form.objects) == 1
    assert "Scale" in next(iter(form.objects))


def test_a_compiled_model_brings_along_what_the_settings_leave_out(rows: pd.DataFrame) -> None:
    model = dense()
    model.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae"], loss_weights=[2.0])
    before = model.get_weights()
    found = fitted(rows, model=model, optimizer=None, loss=None, shuffle=False, batch_size=20, epochs=2)
    reference = keras.models.clone_model(model)
    reference.set_weights(before)
    reference.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae"], loss_weights=[2.0])
    history = reference.fit(
        rows[COLUMNS].to_numpy(), rows[["y"]].to_numpy(), batch_size=20, epochs=2, shuffle=False, verbose=0
    )
    for mine, theirs in zip(found.keras().get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5)
    for name in ("loss", "mae"):
        assert [entry[name] for entry in found.history] == pytest.approx(history.history[name], rel=1e-5)
    assert all((a == b).all() for a, b in zip(before, model.get_weights(), strict=True)), (
        "the model itself is as it was"
    )


def test_classes_of_one_score_and_of_several(rows: pd.DataFrame) -> None:
    sigmoid = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1, "sigmoid")])
    one = fitted(rows, model=sigmoid, loss="binary_crossentropy", label_cols="c", optimizer="adam")
    assert (one.signature.task, one.signature.activation) == ("classification", "none")
    found = one.predict(rows)
    raw = sigmoid_of(one, rows)
    np.testing.assert_allclose(found["probability"][:, 1], raw, rtol=1e-6)
    scores = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    several = fitted(rows, model=scores, loss=loss, label_cols="c")
    assert (several.signature.task, several.signature.activation) == ("classification", "softmax")
    np.testing.assert_allclose(several.predict(rows)["probability"].sum(1), 1)


def sigmoid_of(model: Any, rows: pd.DataFrame) -> Any:
    return model.keras().predict(rows[COLUMNS].to_numpy(), verbose=0)[:, 0]


def test_a_later_fit_in_the_same_run_directory_continues_and_another_training_is_refused(
    rows: pd.DataFrame, tmp_path: Path
) -> None:
    place = {"run_dir": str(tmp_path / "run")}
    fitted(rows, epochs=2, **place)
    longer = fitted(rows, epochs=4, **place)
    whole = fitted(rows, epochs=4)
    assert [entry["loss"] for entry in longer.history] == pytest.approx([e["loss"] for e in whole.history], rel=1e-5)
    with pytest.raises(BadSetting, match=r"another training: .*learning_rate: 0.5, was 0.0"):
        fitted(rows, epochs=4, optimizer=keras.optimizers.SGD(0.5), **place)
    with pytest.raises(BadSetting, match=r"another training: .*loss: 'mae', was 'mse'"):
        fitted(rows, epochs=4, loss="mae", **place)


def two() -> Any:
    x = keras.layers.Input((3,))
    return keras.Model(x, [keras.layers.Dense(1, name="a")(x), keras.layers.Dense(1, name="b")(x)])


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"model": two, "label_cols": {"a": ["y"], "b": ["c"]}},
        BadSetting,
        "names 2 labels, and loss=mse is one",
    ),
    ({"model": two}, BadData, r"names 1 label, and the model returns 2 outputs: a \[batch, 1\], b \[batch, 1\]"),
    (
        {"model": two, "label_cols": {"a": ["y"], "z": ["c"]}, "loss": {"a": "mse", "z": "mse"}},
        BadData,
        "labels 'a', 'z', and the model's outputs are 'a', 'b'",
    ),
    ({"label_cols": ["y", "x0"]}, BadData, r"output 'prediction' is \[batch, 1\].*'y', 'x0' is \[batch, 2\]"),
    ({"feature_cols": ["x0", "x1"]}, BadData, r"(?s)can't take these features.*features \[batch, 2\]"),
    ({"optimizer": None}, BadSetting, "there is no optimizer, and the model is not compiled"),
    ({"optimizer": keras.optimizers.SGD}, BadSetting, "is no optimizer of Keras"),
    ({"loss": keras.losses.MeanSquaredError}, BadSetting, "is a class; give an instance"),
    ({"loss": keras.losses.MeanSquaredError(reduction="sum")}, BadSetting, 'reduction="sum"'),
    ({"metrics": "mae"}, BadSetting, "metrics='mae' must be a list"),
    ({"metrics": ["nonsense"]}, BadData, "Loss or metrics can't take what there is"),
    ({"callbacks": [keras.callbacks.BackupAndRestore("x.keras")]}, BadSetting, "leave it out, and give run_dir="),
    ({"callbacks": [keras.callbacks.EarlyStopping]}, BadSetting, "EarlyStopping is a class; give an instance"),
    ({"early_stopping": EarlyStopping(monitor="acc")}, BadSetting, "monitors 'acc'; the history will have loss"),
    ({"model": lambda: "no model"}, BadSetting, "returned a str, not a keras.Model"),
    ({"model": torch.nn.Linear(3, 1)}, BadSetting, "which TorchEstimator trains"),
    ({"backend": "theano"}, BadSetting, "backend='theano' is unknown"),
    ({"shuffle": "stream"}, BadSetting, "shuffle='stream' is unknown"),
    ({"model": Subclassed()}, BadSetting, "a function that makes it: model=make_model"),
    ({"framework": "torch"}, BadSetting, "is not that of this estimator"),
    (
        {"framework": tr.Keras(backend="jax"), "backend": "torch"},
        BadSetting,
        "and backend is 'torch'. Leave",
    ),
    ({"learning_rate": 0.1}, BadSetting, "the first argument of keras.optimizers.Adam"),
    ({"validation_split": 0.1}, BadSetting, "Did you mean 'validation'"),
]


@pytest.mark.parametrize(("changes", "kind", "text"), REFUSED, ids=[text[:40] for *_, text in REFUSED])
def test_what_does_not_fit_is_refused_before_anything_starts(
    rows: pd.DataFrame, changes: dict[str, Any], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        fitted(rows, **changes)


def test_a_loss_may_refer_to_a_module_that_keras_would_import_and_that_is_not_there(rows: pd.DataFrame) -> None:
    from keras.src.utils.module_utils import LazyModule  # as its own code refers to TensorFlow

    absent = LazyModule("a_framework_that_is_not_installed")

    def loss(y: Any, p: Any) -> Any:
        return keras.ops.mean(abs(y - p)) if absent else None

    layers = [keras.layers.Input((3,)), keras.layers.Dense(1)]
    model = fitted(rows, model=keras.Sequential(layers), loss=loss)
    assert np.isfinite(model.history[-1]["loss"])


def test_a_model_of_another_back_end_is_refused() -> None:
    with pytest.raises(BadSetting, match=r"made on Keras's back end 'torch', and backend='jax'. Leave backend= out"):
        KerasSettings(model=dense(), backend="jax", feature_cols=COLUMNS, label_cols=["y"])


OF_TENSORFLOW = """
import keras, tensorflow, torch
from tritium.errors import BadSetting
from tritium.ml.torch.module import make_module
from tritium.ml.torch.settings import TorchSettings

class Module(tensorflow.Module):
    def __call__(self, x):
        return x

made = keras.Sequential([keras.layers.Dense(1)])
for model in (made, lambda: made, Module(), Module):
    try:
        loss, sgd = torch.nn.MSELoss(), lambda p: torch.optim.SGD(p, 0.1)
        make_module(TorchSettings(model=model, optimizer=sgd, loss=loss, feature_cols=["a"], label_cols=["y"]))
    except BadSetting as error:
        print(error)
"""


@pytest.mark.processes
def test_models_of_tensorflow_are_refused_by_torch_estimator() -> None:
    if find_spec("tensorflow") is None:
        pytest.skip("tensorflow is not installed")
    environment = {**os.environ, "KERAS_BACKEND": "tensorflow"}
    found = subprocess.run([sys.executable, "-c", OF_TENSORFLOW], env=environment, capture_output=True, text=True)
    of_keras = "a model of Keras: KerasEstimator trains it, on each of Keras's back ends."
    of_tensorflow = "a module of TensorFlow, and TorchEstimator trains a torch.nn.Module. A Keras model is trained by"
    lines = found.stdout.splitlines()
    assert len(lines) == 4, found.stderr
    assert lines[0].endswith(f"model=Sequential is {of_keras}")
    assert lines[1].endswith(f"returned {of_keras}")
    assert f"model=Module is {of_tensorflow}" in lines[2]
    assert f"model=Module returned {of_tensorflow}" in lines[3]


def test_words_that_are_learnt_decide_the_size_of_an_embedding(tmp_path: Path) -> None:
    def make(vocabulary: Any) -> Any:
        x, city = keras.Input((2,), name="x"), keras.Input((), dtype="int64", name="city")
        known = keras.layers.Embedding(len(vocabulary["city"]), 2)(city)
        return keras.Model({"x": x, "city": city}, keras.layers.Dense(1)(keras.layers.Concatenate()([x, known])))

    ids = np.arange(60)
    frame = pd.DataFrame({"a": np.sin(ids), "b": np.cos(ids)})
    frame["city"] = np.take(["Rome", "Oslo", "Lima", "Rome"], ids % 4)
    frame["y"] = frame.a + (frame.city == "Rome")
    features = {"x": ["a", "b"], "city": "city"}
    settings: dict[str, Any] = {"feature_cols": features, "label_cols": ["y"], "vocabulary": ["city"]}
    estimator = KerasEstimator(model=make, loss="mse", optimizer="adam", backend="torch", **settings, **QUIET)
    model = estimator.fit(frame)
    assert model.signature.inputs[1].codec["vocabulary"] == ("Rome", "Lima", "Oslo")
    model.model.save(str(tmp_path / "model"))
    again = tr.load(str(tmp_path / "model"), trusted=True)
    np.testing.assert_allclose(again.predict(frame), model.predict(frame), rtol=1e-6)


def test_a_floating_label_of_one_score_is_a_class(rows: pd.DataFrame) -> None:
    def made() -> Any:
        return keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1, activation="sigmoid")])

    one: dict[str, Any] = {"model": made, "optimizer": "adam", "loss": "binary_crossentropy", "feature_cols": COLUMNS}
    one |= {**QUIET, "label_cols": "c", "epochs": 3}
    expected = KerasEstimator(**one).fit(rows).predict(rows)
    found = KerasEstimator(**one).fit(rows.assign(c=rows.c.astype(float))).predict(rows)
    np.testing.assert_array_equal(found["probability"], expected["probability"])
    words = rows.assign(c=np.where(rows.c == 1, "up", "down"))
    named = KerasEstimator(**one, vocabulary={"c": ["down", "up"]}).fit(words).predict(rows)
    np.testing.assert_array_equal(named["probability"], expected["probability"])
    assert [{"down": 0, "up": 1}[word] for word in named["prediction_label"]] == named["prediction"].tolist()
    soft = KerasEstimator(**one).fit(rows.assign(c=0.3)).predict(rows)
    assert soft["probability"][:, 1].mean() == pytest.approx(0.5, abs=0.2)
    for label in (rows.c * 2, rows.c * 2.0, rows.c * 1.5):  # integers, too: Keras computes a loss of any number
        with pytest.raises(BadRow, match=r"'c' holds (2|1\.5), and binary_crossentropy compares one score a row"):
            KerasEstimator(**one).fit(rows.assign(c=label))


def test_a_layer_of_words_is_told_to_go(rows: pd.DataFrame) -> None:
    """Whether the column comes as strings, or as the index that the layer can't take."""
    frame = rows.assign(city=np.where(rows.c == 1, "Oslo", "Rome"))

    def made() -> Any:
        words = keras.layers.Input((), dtype="string", name="city")
        index = keras.layers.StringLookup(vocabulary=["Rome", "Oslo"])(words)
        return keras.Model(words, keras.layers.Dense(1)(keras.layers.Embedding(3, 2)(index)))

    def without() -> Any:
        index = keras.layers.Input((), dtype="int64", name="city")
        return keras.Model(index, keras.layers.Dense(1)(keras.layers.Embedding(2, 2)(index)))

    one: dict[str, Any] = {"optimizer": "adam", "loss": "mse", "feature_cols": "city", "label_cols": ["y"], **QUIET}
    with pytest.raises(BadData, match=r"vocabulary= takes the place of a StringLookup in the model, which is left out"):
        KerasEstimator(model=made, **one).fit(frame)
    with pytest.raises(
        BadData, match=r"The model has a StringLookup, which takes words, and column .city. comes as their index"
    ):
        KerasEstimator(model=made, **one, vocabulary=["city"]).fit(frame)
    found = KerasEstimator(model=without, **one, vocabulary=["city"]).fit(frame).predict(frame)
    assert len(set(found)) == 2


def test_ignored_classes_are_for_one_rank(rows: pd.DataFrame) -> None:
    def made() -> Any:
        return keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2, activation="softmax")])

    def compiled() -> Any:
        model = made()
        model.compile("adam", ignoring)
        return model

    ignoring = keras.losses.SparseCategoricalCrossentropy(ignore_class=1)
    one: dict[str, Any] = {"feature_cols": COLUMNS, "label_cols": "c", **QUIET}
    KerasEstimator(model=made, optimizer="adam", loss=ignoring, **one).fit(rows)
    for settings in ({"model": made, "optimizer": "adam", "loss": ignoring}, {"model": compiled()}):
        with pytest.raises(BadSetting, match=r"has ignore_class=1, and its mean .* 2 ranks would learn otherwise"):
            KerasEstimator(**settings, **{**one, "on": "driver"}, ranks=2).fit(rows)


def test_a_model_by_example_knows_its_framework() -> None:
    """`tr.Model(model, example=…)` needs neither a signature nor `engine`."""
    rows = pd.DataFrame({"a": [1.0, 2.0, -3.0], "b": [0.5, -1.0, 2.0]})
    layers = keras.Sequential([keras.layers.Dense(2, activation="softmax")])
    model = tr.Model(layers, example=rows, task="classification", activation="none")
    assert model.engine.name == "keras"
    assert [(output.name, output.shape) for output in model.signature.outputs] == [("prediction", (2,))]
    found = model.transform(rows)
    scores = layers.predict_on_batch(rows[["a", "b"]].to_numpy(np.float32))
    np.testing.assert_array_equal(found["prediction"], scores.argmax(axis=1))
