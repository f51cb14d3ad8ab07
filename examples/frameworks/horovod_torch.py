"""Train a PyTorch model with Horovod on the rows of a DataFrame, on two ranks: no horovodrun, MPI or SSH."""

import os
import sys

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # the ranks' Python is this one

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import tritium as tr


def train(epochs):
    import horovod.torch as hvd
    import torch

    hvd.init()
    model = torch.nn.Linear(2, 1)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    for epoch in tr.world().shard("train").epochs(epochs, batch_size=32):
        for batch in epoch:
            loss = torch.nn.functional.mse_loss(model(batch["x"])[:, 0], batch["y"])
            optimizer.zero_grad()
            (loss * batch.scale).backward()  # the mean over the rows of all ranks, also where a last batch is short
            optimizer.step()
    return [*model.weight[0].tolist(), model.bias.item()]


if __name__ == "__main__":
    spark = SparkSession.builder.master("local[2]").getOrCreate()
    df = spark.range(1000).select(F.array(F.rand(1), F.rand(2)).alias("x"))
    df = df.select("x", (2 * F.col("x")[0] - F.col("x")[1] + 3).alias("y"))
    weights = tr.launch(train, ranks=2, args=(40,), framework="horovod", data={"train": df})
    assert weights[0] == weights[1]
    assert all(abs(found - real) < 0.05 for found, real in zip(weights[0], [2, -1, 3], strict=True)), weights
    spark.stop()
