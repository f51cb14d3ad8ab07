"""The same model on a stream of files."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import tritium as tr
from tritium.ml import TorchModel
from tritium.model.signature import Input, Output, Signature

SIGNATURE = Signature((Input("features", ("a", "b"), "float32", (2,)),), (Output("y", shape=(1,)),), "regression")


class Counting(nn.Module):
    """A model that writes one file whenever it is loaded."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        self.line = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(x)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        os.close(tempfile.mkstemp(prefix=f"{os.getpid()}-", dir=self.place)[0])


def test_a_stream_of_files_is_scored_with_a_model_that_stays_loaded(spark: Any, tmp_path: Path) -> None:
    place, source, sink = (tmp_path / name for name in ("loads", "source", "sink"))
    place.mkdir()
    draw = np.random.default_rng(0)
    for number in range(8):
        values = draw.normal(size=(10, 2))
        frame = spark.createDataFrame([(number * 10 + i, float(a), float(b)) for i, (a, b) in enumerate(values)])
        frame.toDF("id", "a", "b").coalesce(1).write.mode("append").json(str(source))
    model = TorchModel(tr.Model(Counting(str(place)), SIGNATURE), batch_size=4)
    events = spark.readStream.schema("id long, a double, b double").option("maxFilesPerTrigger", 1).json(str(source))
    query = (
        model.transform(events)
        .where("prediction IS NOT NULL")
        .writeStream.format("parquet")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start(str(sink))
    )
    assert query.awaitTermination(120)
    assert query.exception() is None
    assert sum(progress["numInputRows"] > 0 for progress in query.recentProgress) == 8
    found = spark.read.parquet(str(sink)).orderBy("id").toPandas()
    assert list(found.id) == list(range(80))
    np.testing.assert_allclose(found.prediction, model.model.predict(found), rtol=1e-5, atol=1e-6)
    loads = [file.name.split("-")[0] for file in place.iterdir()]
    # Once a worker, whatever the number of micro-batches; Spark starts one more where none has come back yet.
    assert len(loads) == len(set(loads)) < 8
