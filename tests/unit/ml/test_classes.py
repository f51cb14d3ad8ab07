"""Labels that are classes: as words, and as the floating numbers 0.0 and 1.0 against one score."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pandas as pd
import pytest
import sklearn  # noqa: F401 - LightGBM's, which sets environment variables at its import: not in a test
import torch
from torch import nn

import tritium as tr
from tritium.errors import BadData, BadRow, BadSetting
from tritium.ml import LightGBMClassifier, LightGBMRegressor, TorchEstimator
from tritium.model.signature import Output, Signature

HERE: dict[str, Any] = {"on": "here", "progress": False, "output": "none", "verbose": False}


def adam(p: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(p, 0.1)


ONE: dict[str, Any] = {
    "model": lambda: nn.Linear(1, 1),
    "loss": nn.BCEWithLogitsLoss(),
    "optimizer": adam,
    "feature_cols": ["x"],
    "epochs": 20,
    **HERE,
}


def rows() -> pd.DataFrame:
    x = np.linspace(-1, 1, 60)
    frame = pd.DataFrame({"x": x, "churn": np.where(x > 0.3, "yes", "no"), "level": np.where(x > 0, "high", "low")})
    frame["flag"] = (x > 0.3).astype(float)
    frame.loc[::10, "level"] = "middle"
    return frame


def test_two_words_and_one_score() -> None:
    frame = rows()
    model = TorchEstimator(**ONE, label_cols="churn", vocabulary=["churn"]).fit(frame)
    assert model.label_words == {"churn": ["no", "yes"]}
    found = model.transform(frame)
    assert (found.prediction_label == frame.churn).mean() > 0.9
    same = TorchEstimator(**ONE, label_cols="flag").fit(frame)
    np.testing.assert_array_equal(np.stack(found.probability), np.stack(same.transform(frame).probability))
    np.testing.assert_allclose(np.exp(np.stack(found.rawPrediction)), np.stack(found.probability), rtol=1e-14)


def test_words_that_are_no_classes_are_refused_before_anything_starts() -> None:
    frame = rows()
    with pytest.raises(BadData, match=r"'level' is a string of 3 words .* compares one score with 0 or 1"):
        TorchEstimator(**ONE, label_cols="level", vocabulary=["level"]).fit(frame)
    trees: dict[str, Any] = {"feature_cols": ["x"], "label_cols": "level", "num_iterations": 2, **HERE}
    with pytest.raises(BadData, match=r"learnt in the order of their frequency: no numbers to predict"):
        LightGBMRegressor(**trees, vocabulary=["level"]).fit(frame)
    ordered = LightGBMRegressor(**trees, vocabulary={"level": ["low", "middle", "high"]}).fit(frame)
    assert list(ordered.transform(frame).columns)[-1] == "prediction"


def test_a_word_that_was_not_trained_on() -> None:
    """It is an error in training; where rows are only scored, its index is the one after the last word's."""
    frame = rows()
    trees: dict[str, Any] = {"feature_cols": ["x"], "label_cols": "churn", "num_iterations": 5, **HERE}
    model = LightGBMClassifier(**trees, vocabulary=["churn"], label_index_col="index").fit(frame)
    later = frame.head(4).assign(churn=["no", "maybe", None, np.nan])
    np.testing.assert_array_equal(model.transform(later)["index"], [0, 2, np.nan, np.nan])
    with pytest.raises(BadRow, match=r"'maybe', which is not among the 2 values"):
        LightGBMClassifier(**trees, vocabulary=["churn"], validation=later.head(2)).fit(frame)


def test_columns_of_a_model_are_named_each_once() -> None:
    frame = rows()
    model = TorchEstimator(**ONE, label_cols="flag", raw_prediction_col="raw").fit(frame)
    assert list(model.transform(frame[["x"]]).columns) == ["x", "prediction", "probability", "raw"]
    assert list(model.setParams(raw_prediction_col="").transform(frame[["x"]])) == ["x", "prediction", "probability"]
    with pytest.raises(BadSetting, match=r"two columns 'prediction'"):
        model.setParams(raw_prediction_col="Prediction").transform(frame)
    with pytest.raises(BadSetting, match=r"has a column 'raw' already.* raw_prediction_col="):
        model.setParams(raw_prediction_col="raw").transform(frame.assign(raw=1))
    with pytest.raises(BadSetting, match=r"a column 'rawPrediction' already.*raw_prediction_col='another_raw"):
        TorchEstimator(**ONE, label_cols="flag").fit(frame.assign(rawPrediction=1.0))
    assert list(model.setOutputCols(["p"]).transform(frame[["x"]])) == ["x", "p"]
    with pytest.raises(BadSetting, match=r"probability_col and prediction_label_col are both 'p'"):
        TorchEstimator(**ONE, label_cols="churn", probability_col="p", prediction_label_col="p")


def test_a_signature_without_words_is_read_and_one_with_too_many_refused() -> None:
    model = TorchEstimator(**ONE, label_cols="flag").fit(rows()).model
    whole = model.signature.to_json()
    plain = dict(whole)
    del plain["label_words"]  # as it was saved before there were any
    assert Signature.from_json(plain).to_json() == whole
    with pytest.raises(BadSetting, match="label_words has 3 words, and the model gives scores of 2 classes"):
        tr.Model(model.module, model.signature, label_words={"churn": ["a", "b", "c"]})
    with_words = tr.Model(model.module, model.signature, label_words={"churn": ["no", "yes"]})
    assert set(with_words.predict(rows())["prediction_label"]) == {"no", "yes"}
    scores = (Output("y", shape=(None,)),)
    lacking = dataclasses.replace(model.signature, outputs=scores, label_words={"churn": ["no"]})
    found = tr.Model(nn.Linear(1, 2), lacking).predict(np.float32([[9.0], [-9.0]]))
    assert sorted(map(str, found["prediction_label"])) == ["None", "no"]


@pytest.mark.parametrize("loss", [nn.BCEWithLogitsLoss(), nn.functional.binary_cross_entropy_with_logits])
def test_a_floating_label_of_one_score_is_a_class(loss: Any) -> None:
    frame = rows()
    model = TorchEstimator(**ONE | {"loss": loss}, label_cols="flag").fit(frame)
    counted = TorchEstimator(**ONE | {"loss": loss}, label_cols="c").fit(frame.assign(c=frame.flag.astype(int)))
    found = model.predict(frame)
    np.testing.assert_array_equal(found["probability"], counted.predict(frame)["probability"])
    assert (found["prediction"] == frame.flag).mean() > 0.9
    raw = TorchEstimator(**ONE | {"loss": loss}, label_cols="flag", task="regression").fit(frame)
    np.testing.assert_allclose(1 / (1 + np.exp(-raw.predict(frame))), found["probability"][:, 1], rtol=1e-6)
    with pytest.raises(BadRow, match=r"'flag' holds 2, and loss=.* compares one score a row with 0 or 1"):
        TorchEstimator(**ONE | {"loss": loss}, label_cols="flag").fit(frame.assign(flag=frame.flag * 2))


def test_soft_labels_are_trained_on_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    frame = rows()
    told = {**ONE, "progress": True, "verbose": True, "epochs": 1}
    TorchEstimator(**told, label_cols="flag").fit(frame)
    assert "predictions are the classes" not in capsys.readouterr().out
    TorchEstimator(**told, label_cols="rate").fit(frame.assign(rate=0.25))
    assert "label column 'rate' holds 0.25: predictions are the classes 0 and 1" in capsys.readouterr().out
    frame["rate"] = 1 / (1 + np.exp(-3 * frame.x))
    found = TorchEstimator(**ONE | {"epochs": 60}, label_cols="rate").fit(frame).predict(frame)
    np.testing.assert_allclose(found["probability"][:, 1], frame.rate, atol=0.02)
