"""This Spark has all private interfaces that Tritium uses; without them it does the same by public ones."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from pyspark.sql import functions as F

import tritium as tr
from clusters import set_to
from tritium.ml import TorchModel
from tritium.model.signature import Input, Output, Signature
from tritium.predict.spark import score
from tritium.spark.inside import SETTING, USES

WITHOUT = {
    "batch_bytes": "threads share the JVM's",  # Only where a session was made with pinned threads off.
    "end_of_stream": "not tried with the workers of Spark",
    "hangs": "computes them",
    "as_rows": "columnarInput",
    "pods": "has no io.fabric8.kubernetes.client.KubernetesClient",  # They are on Kubernetes alone.
}
"""Use → the reason of a Spark in which it is not needed or not known."""


@pytest.mark.parametrize("name", USES)
def test_the_probe_finds_it(spark: Any, name: str) -> None:
    with set_to(spark, **{SETTING: ""}):
        why = importlib.import_module(f"tritium.spark.inside.{name}").used.why_not(spark)
    assert why is None or WITHOUT.get(name, "nothing") in why


def test_with_all_turned_off_a_launch_a_score_and_a_saved_model_are_the_same(spark: Any, tmp_path: Path) -> None:
    rows = spark.range(0, 40, 1, 4).select("id", F.array(F.col("id").cast("float"), F.lit(1.0)).alias("x"))
    rows.write.parquet(str(tmp_path / "rows"))
    frame = spark.read.parquet(str(tmp_path / "rows"))

    def sums() -> tuple[int, float]:
        shard = tr.world().shard("train")
        taken = [batch["x"] for epoch in shard.epochs(1, batch_size=4, shuffle=False) for batch in epoch]
        return shard.rows, float(sum(x.sum() for x in taken))

    signature = Signature((Input("x", ("x",), "float32", (2,)),), (Output("y", "float32", (1,)),))
    model = tr.Model(torch.nn.Linear(2, 1), signature)

    def everything(folder: str) -> tuple[Any, ...]:
        received = tr.launch(sums, data={"train": frame}, ranks=2, progress=False)
        scored = sorted((row.id, row.y) for row in score(model, frame, output_cols=["y"]).select("id", "y").collect())
        TorchModel(model).write().save(f"{tmp_path}/{folder}")
        again = TorchModel.read().load(f"{tmp_path}/{folder}")
        loaded = sorted((row.id, row.prediction) for row in again.transform(frame).collect())
        return sorted(received), scored, loaded

    with set_to(spark, **{SETTING: ""}):
        used = everything("used")
    with set_to(spark, **{SETTING: ",".join(f"-{name}" for name in USES)}):
        assert everything("off") == used
