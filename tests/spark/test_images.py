"""Images as Spark reads them are trained on and scored as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from torch import nn

from tritium.errors import BadData
from tritium.ml import TorchEstimator, TorchModel

ROWS = 12


def pixels(number: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(number).integers(0, 256, (4, 6, 3)).astype(np.uint8)


@pytest.fixture
def images(spark: SparkSession, tmp_path: Path) -> DataFrame:
    (tmp_path / "images").mkdir()
    for number in range(ROWS):
        Image.fromarray(pixels(number)).save(tmp_path / "images" / f"{number}.png")
    frame = spark.read.format("image").load(str(tmp_path / "images"))
    number = F.regexp_extract("image.origin", r"(\d+)\.png", 1).cast("int")
    return frame.withColumn("number", number).withColumn("y", number.cast("double"))


class Reads(nn.Module):
    """A module of images whose first output is the blue of the first pixel: Spark has them as BGR."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x[:, 0, 0, 0], self.layer(x.permute(0, 3, 1, 2)).mean((1, 2, 3))], 1)


def test_trained_and_scored_as_they_are(images: DataFrame, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"loss": lambda output, label: output[:, 1].square().mean(), "feature_cols": "image"}
    settings |= {"optimizer": lambda p: torch.optim.SGD(p, 0.01), "label_cols": ["y"], "ranks": 2, "batch_size": 4}
    estimator = TorchEstimator(model=Reads, **settings, progress=False, output="none", verbose=False)
    with pytest.raises(BadData, match=r"It takes features as \[batch, 4, 6, 3\] float32: transform=lambda x: .* / 255"):
        estimator.fit(images)
    model = estimator.setTransform(lambda x: {"features": x["features"] / 255}).fit(images)
    assert model.model.signature.inputs[0].shape == (4, 6, 3)
    found = {row.number: row.prediction for row in model.transform(images).select("number", "prediction").collect()}
    for number in range(ROWS):
        assert found[number][0] == pytest.approx(pixels(number)[0, 0, 2] / 255)
    model.save(str(tmp_path / "model"))
    images.sparkSession.conf.set("spark.tritium.trustModels", "true")
    again = TorchModel.load(str(tmp_path / "model"))
    images.sparkSession.conf.unset("spark.tritium.trustModels")
    some = images.where("number < 3")
    assert [row.prediction for row in again.transform(some).orderBy("number").collect()] == [found[n] for n in range(3)]
    local = again.transform(some.toPandas().sort_values("number"))
    np.testing.assert_allclose(list(local["prediction"]), [found[number] for number in range(3)], rtol=1e-6)
