"""Train a PyTorch model on the rows of a DataFrame, data-parallel on two ranks."""

import os
import sys

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # the ranks' Python is this one

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import tritium as tr


def train(epochs):
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group()  # torchrun's variables are set
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    loader = tr.world().shard("train").loader(batch_size=32, scale_col="scale")
    for _ in range(epochs):
        for batch in loader:
            loss = torch.nn.functional.mse_loss(model(batch["x"])[:, 0], batch["y"])
            optimizer.zero_grad()
            (loss * batch["scale"]).backward()
            optimizer.step()
    dist.destroy_process_group()
    return [*model.module.weight[0].tolist(), model.module.bias.item()]


if __name__ == "__main__":
    spark = SparkSession.builder.master("local[2]").getOrCreate()
    df = spark.range(1000).select(F.array(F.rand(1), F.rand(2)).alias("x"))
    df = df.select("x", (2 * F.col("x")[0] - F.col("x")[1] + 3).alias("y"))
    weights = tr.launch(train, ranks=2, args=(40,), framework="torch", data={"train": df})
    assert weights[0] == weights[1]
    assert all(abs(found - real) < 0.05 for found, real in zip(weights[0], [2, -1, 3], strict=True)), weights
    spark.stop()
