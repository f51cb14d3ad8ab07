"""Rows of a DataFrame that can't be used are left out of a training, and counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from pyspark.sql import functions as F
from torch import nn

from tritium.data.exchange import Exchange
from tritium.data.schema import Data
from tritium.ml import TorchEstimator

from .received import receive


def test_a_classification_leaves_out_what_it_cant_read(spark: Any, tmp_path: Path) -> None:
    k = F.col("id")
    rows = spark.range(0, 400, 1, 3).select(
        F.when(k != 7, F.sin("id")).alias("a"),
        F.when(k == 90, float("nan")).otherwise(F.cos("id")).alias("b"),
        F.when(k == 200, 0.5).when(k != 201, (k % 2).cast("double")).alias("y"),
    )
    model = TorchEstimator(
        model=lambda: nn.Linear(2, 2), loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, 0.1),
        feature_cols=["a", "b"], label_cols=["y"], validation=0.2, epochs=1, ranks=2, on_error="skip",
        run_dir=str(tmp_path), progress=False, output="none",
    ).fit(rows)  # fmt: skip
    (report,) = (json.loads(path.read_text()) for path in tmp_path.rglob("report.json"))
    shards = [rank["shards"] for rank in report["ranks"]]
    skipped = {name: sum(one[name].get("skipped", 0) for one in shards) for name in ("train", "validation")}
    assert sum(skipped.values()) == 4
    assert sum(one[name]["rows"] for one in shards for name in skipped) == 396
    assert model.history[-1]["rows_skipped"] == skipped["train"]
    assert model.transform(rows).count() == 398, "without a label a row has a prediction"


def test_what_the_jvm_marks_is_left_out_too(spark: Any) -> None:
    rows = spark.createDataFrame([(1, 1.0, [1.0]), (2, float("nan"), [1.0]), (3, 1e300, [1.0]), (4, 4.0, [1.0, 2.0])])
    rows = rows.toDF("k", "x", "v").coalesce(1)
    data = Data(rows, {"n": ["k", "x"], "v": "v"}, dtype={"n": "int64"}, on_error="skip")
    (found,) = receive(Exchange({"t": data}, 1))
    assert found["columns"]["t"]["n"].tolist() == [[1, 1]]
