"""Two ranks fit a line to the rows of a DataFrame. In cluster mode the driver is a pod, and so is each executor."""

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import tritium as tr


def train():
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.2)
    loader = tr.world().shard("train").loader(batch_size=32, scale_col="scale")
    for _ in range(40):
        for batch in loader:
            loss = torch.nn.functional.mse_loss(model(batch["x"])[:, 0], batch["y"])
            optimizer.zero_grad()
            (loss * batch["scale"]).backward()
            optimizer.step()
    dist.destroy_process_group()
    return model.module.weight.item(), model.module.bias.item()


if __name__ == "__main__":
    spark = SparkSession.builder.getOrCreate()
    df = spark.range(500).select(F.array(F.rand(1)).alias("x"))
    df = df.select("x", (2 * F.col("x")[0] + 3).alias("y"))
    for slope, intercept in tr.launch(train, ranks=2, framework="torch", data={"train": df}):
        print(f"y = {slope:.1f} x + {intercept:.1f}")
    spark.stop()
