"""Train a Flax network with Optax on a DataFrame: two ranks, one program over the devices of both."""

import os
import sys

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

from pyspark.sql import SparkSession

import tritium as tr


def train(epochs):
    import flax.linen as nn
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()), ("data",))  # the devices of all ranks
    everywhere = NamedSharding(mesh, PartitionSpec())

    net = nn.Sequential([nn.Dense(32), nn.relu, nn.Dense(1)])
    optimizer = optax.adam(1e-2)
    params = jax.device_put(net.init(jax.random.key(0), jnp.zeros((1, 2))), everywhere)
    state = jax.device_put(optimizer.init(params), everywhere)

    def loss_of(params, batch, weights):
        error = net.apply(params, batch["x"])[:, 0] - batch["y"]
        return jnp.sum(weights * error**2) / jnp.sum(weights)

    @jax.jit
    def step(params, state, batch, weights):
        loss, gradients = jax.value_and_grad(loss_of)(params, batch, weights)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state, loss

    world = tr.world()
    for epoch in world.shard("train").jax(epochs, batch_size=64, mesh=mesh):
        for batch in epoch:
            params, state, loss = step(params, state, dict(batch), batch.weights)
        if world.rank == 0:
            world.log(epoch=epoch.number, epochs=epochs, loss=loss)
    return float(loss), jax.tree.map(np.asarray, params)  # the same on every rank


if __name__ == "__main__":
    spark = SparkSession.builder.master("local[2]").getOrCreate()
    rows = spark.range(2000).selectExpr("array(sin(id), cos(id)) as x", "2 * sin(id) - cos(id) + 0.5 as y")

    (loss, params), (other, _) = tr.launch(train, ranks=2, framework="jax", data={"train": rows}, args=(5,))
    print(f"loss {loss:.4f}", {name: list(layer["kernel"].shape) for name, layer in params["params"].items()})
    assert loss == other < 0.05
