"""The contract of all engines, on Spark, of Keras, whose workers import TensorFlow. Others: tests/spark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engines
import settled
from device_processes import end, plan_of
from tritium.ml import TorchModel
from tritium.predict.device_engine import connected

settled.keras_on_torch()  # Which is imported once in a process of tests, and sets variables of its environment.


@pytest.fixture(scope="module", autouse=True)
def _keras_settled() -> None:
    settled.settle_keras()


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_a_batch_a_stream_and_an_evaluator(spark: Any, tmp_path: Path) -> None:
    engines.check_on_spark(spark, engines.case_of("keras"), tmp_path)


def test_a_module_is_compiled_in_the_workers(spark: Any) -> None:
    case, frame = engines.case_of("torch"), engines.rows(40)
    model = TorchModel(case.model(), compile=True, precision="bf16")
    scored = model.transform(spark.createDataFrame(frame).coalesce(1)).toPandas().sort_values("id")
    expected = np.stack(scored.probability.map(lambda vector: vector.toArray()))
    exact = case.model().predict(frame)
    assert isinstance(exact, dict)
    assert 0 < np.abs(expected - exact["probability"]).max() < 0.02


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_in_the_engine_process_of_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))
    case = engines.case_of("keras")
    batch = {"x": np.arange(8, dtype=np.float32).reshape(4, 2)}
    try:
        with connected(*plan_of(case.model()), cpus=1, gpus=[]) as engine:
            np.testing.assert_allclose(engine.call(batch, ["scores"])["scores"], case.scores(batch["x"]), rtol=1e-5)
    finally:
        end()
