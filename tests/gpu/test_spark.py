"""A Spark cluster whose worker has the GPUs of this machine: ranks and scoring tasks get theirs from Spark."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tritium as tr
from device_processes import running
from gpu.gpus import MARKS
from gpu.test_estimators import deep
from tritium.ml import TorchModel
from tritium.model.signature import Input, Output, Signature

pytestmark = [*MARKS, pytest.mark.parametrize("cluster", ["real-gpu"], indirect=True)]
QUIET: dict[str, Any] = {"ranks": 1, "gpus": 1, "retries": 0, "progress": False, "output": "none"}


def frame(spark: Any) -> Any:
    return (
        spark.range(0, 4000, 1, 2)
        .selectExpr("cast(sin(id * 1.7) as float) as a", "cast(cos(id * 0.9) as float) as b")
        .selectExpr("a", "b", "3 * a - 2 * b + 1 as y")
    )


def test_a_rank_gets_the_gpu_that_spark_gave_its_task(cluster: Any) -> None:
    def where() -> tuple[str, int]:
        import torch

        return tr.world().device, torch.cuda.device_count()

    assert tr.launch(where, spark=cluster.spark, framework="torch", **QUIET) == [("cuda:0", 1)]


@pytest.mark.parametrize("settings", [{}, {"precision": "bf16"}, {"precision": "fp16"}], ids=str)
def test_from_a_dataframe_to_a_model_and_its_predictions_on_the_gpu(cluster: Any, settings: dict[str, Any]) -> None:
    data = frame(cluster.spark)
    model = deep(**QUIET, **settings, epochs=10, global_batch_size=200).fit(data)
    on_cpu = np.array([row.prediction for row in model.transform(data).select("prediction").collect()]).ravel()
    on_gpu = model.copy().setParams(device="cuda")
    scored = np.array([(row.prediction, row.y) for row in on_gpu.transform(data).select("prediction", "y").collect()])
    np.testing.assert_allclose(scored[:, 0], on_cpu, rtol=1e-3, atol=1e-4)
    assert np.mean((scored[:, 0] - scored[:, 1]) ** 2) < 0.1 * scored[:, 1].var()


def test_one_process_holds_all_models_of_the_gpu(cluster: Any) -> None:
    import torch

    class Doubles(torch.nn.Linear):
        """Returns its product, its process, and whether the weights are on the GPU."""

        def forward(self, x: torch.Tensor) -> Any:
            import os

            facts = torch.tensor([[os.getpid(), self.weight.is_cuda]]).repeat(len(x), 1)
            return super().forward(x), facts[:, 0], facts[:, 1]

    outputs = (Output("y", shape=(1,)), Output("pid", dtype="int64"), Output("cuda", dtype="int64"))
    signature = Signature((Input("x", ("a", "b"), "float32", (2,)),), outputs)
    data = frame(cluster.spark)
    for name in ("first", "second"):
        model = TorchModel(tr.Model(Doubles(2, 1), signature), device="cuda", prediction_col=name)
        data = model.transform(data)
    rows = data.collect()
    (process,) = running()
    assert {(row[name].pid, row[name].cuda) for row in rows for name in ("first", "second")} == {(process.pid, 1)}
    assert len(rows) == 4000
