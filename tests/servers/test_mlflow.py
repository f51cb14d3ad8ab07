"""Models in MLflow: what its pyfunc and its server score are the numbers of the model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import lightgbm  # noqa: F401 - it sets variables of the environment, and onnxruntime writes a file into TMPDIR
import mlflow
import numpy as np
import onnxruntime  # noqa: F401
import pytest

import engines
import settled
import tritium as tr
import tritium.mlflow
from mlflow_server import answering
from tritium.errors import BadRow, ModelError

settled.keras_on_torch()

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning:mlflow"),
    pytest.mark.timeout(400),
]


@pytest.fixture(scope="module", autouse=True)
def _keras_settled() -> None:
    settled.settle_keras()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("mlflow")
    before = dict(os.environ)
    mlflow.set_tracking_uri(f"sqlite:///{folder}/store.db")
    mlflow.create_experiment("tests", (folder / "artifacts").as_uri())
    mlflow.set_experiment("tests")
    yield folder
    mlflow.set_tracking_uri(None)
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.parametrize("name", engines.NAMES)
def test_pyfunc_scores_the_same_numbers(store: Path, name: str) -> None:
    case, frame = engines.case_of(name), engines.rows(40)
    model, columns = case.model(), ["a", "b"]
    with mlflow.start_run():
        info = tritium.mlflow.log_model(model, name="wine", input_example=frame[columns][:3])
    loaded = mlflow.pyfunc.load_model(info.model_uri)
    scored, expected = loaded.predict(frame[columns]), model.predict(frame)
    assert isinstance(expected, dict)
    assert scored.prediction.tolist() == expected["prediction"].tolist()
    np.testing.assert_array_equal(np.stack(scored.probability), expected["probability"])
    assert scored.prediction_label.tolist() == case.words(frame)
    whole = frame[columns].assign(a=np.arange(40))
    assert loaded.predict(whole).prediction.tolist() == model.predict(whole)["prediction"].tolist()  # type: ignore[index]
    frame.loc[5, "a"] = np.nan
    bad = loaded.predict(frame[columns], params={"on_error": "column"})
    assert bad.prediction_error[5] == "column 'a' is NaN"
    with pytest.raises(BadRow):
        loaded.predict(frame[columns])
    assert loaded.metadata.signature.inputs.input_names() == columns
    assert loaded.input_example.shape == (3, 2)
    again = tritium.mlflow.load_model(info.model_uri)
    assert again.signature == model.signature


def test_another_models_uri(store: Path, tmp_path: Path) -> None:
    mlflow.pyfunc.save_model(str(tmp_path / "other"), python_model=lambda model_input: model_input, pip_requirements=[])
    with pytest.raises(ModelError, match="is none of Tritium's"):
        tritium.mlflow.load_model(str(tmp_path / "other"))


def test_the_server_scores_the_same_numbers(tmp_path: Path) -> None:
    case, frame = engines.case_of("torch"), engines.rows(20)
    model: tr.Model = case.model()
    tritium.mlflow.save_model(model, str(tmp_path / "model"), input_example=frame[["a", "b"]][:3])
    records = frame[["a", "b"]].to_dict("records")
    serve = ["models", "serve", "-m", str(tmp_path / "model"), "--env-manager", "local"]
    with answering(serve, "/ping", tmp_path) as url:
        answer: Any = httpx.post(f"{url}/invocations", json={"dataframe_records": records}, timeout=60).json()
        records[4]["a"] = None
        body = {"dataframe_records": records, "params": {"on_error": "column"}}
        bad: Any = httpx.post(f"{url}/invocations", json=body, timeout=60).json()
    expected = model.predict(frame)
    assert isinstance(expected, dict)
    assert [row["prediction"] for row in answer["predictions"]] == expected["prediction"].tolist()
    np.testing.assert_array_equal([row["probability"] for row in answer["predictions"]], expected["probability"])
    assert [row["prediction_label"] for row in answer["predictions"]] == case.words(frame)
    assert [row["prediction_error"] is None for row in bad["predictions"]] == [row != 4 for row in range(20)]
