"""Predict the progress of diabetes by JAX as a Spark ML estimator, on two ranks, with scikit-learn's data."""

import os
import sys

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.sql import SparkSession
from sklearn.datasets import load_diabetes

from tritium.ml import FunctionEstimator, Trained


def network(params, x):
    import jax.numpy as jnp

    return jnp.tanh(x * 20 @ params["w"] + params["b"]) @ params["v"] + params["c"]


def train(world, settings):
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()), ("data",))  # the devices of all ranks
    everywhere = NamedSharding(mesh, PartitionSpec())
    first, second = jax.random.split(jax.random.key(settings.seed))
    params = {"w": jax.random.normal(first, (10, 16)) / 4, "v": jax.random.normal(second, (16,)) * 20}
    params = jax.device_put(params | {"b": jnp.zeros(16), "c": jnp.float32(150)}, everywhere)
    optimizer = optax.adam(settings.config["rate"])
    state = jax.device_put(optimizer.init(params), everywhere)

    def loss_of(params, batch, weights):
        return jnp.sum(weights * (network(params, batch["features"]) - batch["label"][:, 0]) ** 2) / jnp.sum(weights)

    @jax.jit
    def step(params, state, batch, weights):
        loss, gradients = jax.value_and_grad(loss_of)(params, batch, weights)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state, loss

    history = []
    for epoch in world.shard("train").jax(settings.config["epochs"], batch_size=32, mesh=mesh):
        for batch in epoch:
            params, state, loss = step(params, state, dict(batch), batch.weights)
        history.append({"epoch": epoch.number + 1, "loss": float(loss)})
    return Trained(jax.tree.map(np.asarray, params), history)


def predict(params, batch):
    return network(params, batch["features"])


if __name__ == "__main__":
    spark = SparkSession.builder.master("local[2]").getOrCreate()
    frame = load_diabetes(as_frame=True).frame
    rows = spark.createDataFrame(frame)
    estimator = FunctionEstimator(
        train=train,
        predict=predict,
        config={"epochs": 60, "rate": 0.02},
        feature_cols=[name for name in frame.columns if name != "target"],
        label_cols="target",
        task="regression",
        framework="jax",
        ranks=2,
    )
    model = estimator.fit(rows)
    r2 = RegressionEvaluator(labelCol="target", metricName="r2").evaluate(model.transform(rows))
    print(f"loss {model.history[-1]['loss']:.0f}, r2 {r2:.2f}")
    assert r2 > 0.5
