"""The contract of all engines, without Spark: predict, transform, save, load, bad rows. On Spark: tests/spark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras  # noqa: F401 - it sets variables of the environment, as the next, and the third writes a file into TMPDIR
import lightgbm  # noqa: F401
import numpy as np
import onnxruntime  # noqa: F401
import pandas as pd
import pytest

import engines
import tritium as tr
from tritium.errors import BadData, BadSetting, ModelError
from tritium.ml import ONNXModel
from tritium.model.signature import Input, Output, Signature

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@pytest.fixture(scope="module", params=engines.NAMES)
def case(request: pytest.FixtureRequest) -> engines.Case:
    return engines.case_of(request.param)


def test_it_predicts_the_frameworks_own_numbers_and_words(case: engines.Case) -> None:
    frame, model = engines.rows(), case.model()
    assert model.engine.name == case.name
    found = model.predict(frame)
    assert isinstance(found, dict)
    scores = case.scores(frame[["a", "b"]].to_numpy(np.float32)).astype(np.float64)
    expected = scores if case.activation == "none" else np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    np.testing.assert_allclose(found["probability"], expected, rtol=1e-5)
    assert found["prediction_label"].tolist() == case.words(frame)
    scored = model.transform(frame)
    assert scored.prediction_label.tolist() == case.words(frame)
    np.testing.assert_allclose(model.predict(frame, batch_size="auto")["probability"], expected, rtol=1e-5)  # type: ignore[index]


def test_it_is_saved_and_loaded(case: engines.Case, tmp_path: Path) -> None:
    frame, model = engines.rows(), case.model()
    model.save(str(tmp_path / "model"))
    again = tr.load(str(tmp_path / "model"), trusted=True)
    assert again.signature == model.signature
    for name, values in model.predict(frame).items():  # type: ignore[union-attr]
        np.testing.assert_array_equal(again.predict(frame)[name], values)  # type: ignore[index]


def test_a_bad_row_has_its_reason(case: engines.Case) -> None:
    frame = engines.rows(40)
    frame.loc[[3, 17], "a"] = [np.nan, np.inf]
    scored = case.model().transformer(on_error="column", batch_size=16).transform(frame)
    good = ~frame.index.isin([3, 17])
    assert scored.prediction_label[good].tolist() == case.words(frame[good])
    assert scored.prediction_label[~good].tolist() == [None, None]
    assert scored.prediction_error[~good].str.startswith("column 'a' is").all()
    assert scored.prediction_error[good].isna().all()


class TestONNX:
    """What only ONNX files have: a path, a declared signature."""

    def test_from_a_path_with_the_signature_of_the_file(self, tmp_path: Path) -> None:
        (tmp_path / "model.onnx").write_bytes(engines.onnx_file())
        model = tr.Model(str(tmp_path / "model.onnx"), task="classification", label_words=engines.WORDS)
        assert model.signature.inputs == (Input("x", ("x",), "float32", (2,)),)
        assert model.signature.outputs == (Output("scores", "float32", (3,)),)
        x = np.array([[1, 2], [3, 4]], np.float32)
        frame = pd.DataFrame({"x": list(x)})
        expected = engines.case_of("onnx").scores(x).argmax(1)
        assert model.transform(frame).prediction.tolist() == expected.tolist()
        transformer = model.transformer()
        assert isinstance(transformer, ONNXModel)
        assert transformer.content() == engines.onnx_file()

    def test_from_an_example_whose_columns_are_packed(self, tmp_path: Path) -> None:
        (tmp_path / "model.onnx").write_bytes(engines.onnx_file())
        frame = engines.rows(5)
        model = tr.Model(tmp_path / "model.onnx", example=frame[["a", "b"]])
        assert model.signature.columns == ("a", "b")
        scores = engines.case_of("onnx").scores(frame[["a", "b"]].to_numpy(np.float32))
        np.testing.assert_allclose(model.predict(frame), scores, rtol=1e-6)

    def test_several_outputs_and_some_of_them(self, tmp_path: Path) -> None:
        (tmp_path / "model.onnx").write_bytes(engines.onnx_file(more=["again"]))
        model = tr.Model(str(tmp_path / "model.onnx"))
        found = model.predict(np.ones((2, 2), np.float32))
        assert isinstance(found, dict)
        np.testing.assert_array_equal(found["again"], found["scores"])
        one = Signature(model.signature.inputs, (Output("again", "float32", (3,)),))
        some = tr.Model(str(tmp_path / "model.onnx"), one).predict(np.ones((2, 2), np.float32))
        np.testing.assert_array_equal(some, found["again"])

    def test_what_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "model.onnx"
        with pytest.raises(ModelError, match=r"model\.onnx' can't be read: .*No such file"):
            tr.Model(str(path))
        path.write_bytes(b"no model")
        with pytest.raises(ModelError, match=r"ONNX Runtime .* can't read the model"):
            tr.Model(str(path))
        path.write_bytes(engines.onnx_file(rows=1))
        with pytest.raises(BadSetting, match="no batch of any size"):
            tr.Model(str(path))
        path.write_bytes(engines.onnx_file())
        with pytest.raises(BadSetting, match="has no CUDA"):
            tr.Model(str(path)).predict(np.ones((1, 2), np.float32), device="cuda")
        with pytest.raises(BadSetting, match="'warp'"):
            tr.Model(str(path)).predict(np.ones((1, 2), np.float32), device="warp")
        with pytest.raises(BadSetting, match="decode is about the columns of an example"):
            tr.Model(str(path), decode={"x": bytes})
        wrong = Signature((Input("x", ("x",), "float32", (2,)),), (Output("nothing"),))
        with pytest.raises(ModelError, match=r"has the outputs \['scores'\]"):
            tr.Model(str(path), wrong).predict(np.ones((1, 2), np.float32))


class TestFunctions:
    """A function of a batch is a model."""

    def test_its_signature_is_that_of_an_example(self) -> None:
        model = tr.Model(lambda batch: {"sum": batch["features"].sum(1), "n": len(batch["features"]) + 0 * batch[
            "features"][:, 0]}, example=engines.rows(8)[["a", "b"]])  # fmt: skip
        assert [output.name for output in model.signature.outputs] == ["sum", "n"]
        frame = engines.rows(5)
        found: Any = model.predict(frame)
        np.testing.assert_allclose(found["sum"], frame.a + frame.b, rtol=1e-5)

    def test_what_it_returns_must_be_rows(self) -> None:
        with pytest.raises(BadData, match="Let it return numbers with a row for each row"):
            tr.Model(lambda batch: 1.0, example=engines.rows(8)[["a", "b"]])
