"""Train a LightningModule on the rows of a DataFrame, data-parallel on two ranks."""

import os
import sys

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # the ranks' Python is this one

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import tritium as tr


def train():
    import lightning
    import torch

    class Regression(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(2, 1)

        def training_step(self, batch, index):
            loss = torch.nn.functional.mse_loss(self.linear(batch["x"])[:, 0], batch["y"])
            self.log("loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.1)

    trainer = lightning.Trainer(max_epochs=40)  # all ranks of the gang
    model = Regression()
    trainer.fit(model, tr.world().shard("train").loader(batch_size=32), ckpt_path="last")  # a retry resumes
    return trainer.world_size, [*model.linear.weight[0].tolist(), model.linear.bias.item()]


if __name__ == "__main__":
    spark = SparkSession.builder.master("local[2]").getOrCreate()
    df = spark.range(1000).select(F.array(F.rand(1), F.rand(2)).alias("x"))
    df = df.select("x", (2 * F.col("x")[0] - F.col("x")[1] + 3).alias("y"))
    (size, weights), other = tr.launch(train, ranks=2, framework="lightning", data={"train": df})
    assert size == 2
    assert other == (size, weights)
    assert all(abs(found - real) < 0.05 for found, real in zip(weights, [2, -1, 3], strict=True)), weights
    spark.stop()
