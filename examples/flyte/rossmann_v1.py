"""Rossmann's sales as a workflow of flytekit, Flyte's first version: horovod.spark on Spark, horovod.torch by mpirun.

    python rossmann_v1.py --stores 20 --days 500 --epochs 3 --hidden 64 32

Flyte's own example with Horovod (2021) by other imports. Features and network are those of
../rossmann. Runs in this process, without a backend; there the function of the MPIJob is called once.
"""

import argparse
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "torch")  # or jax, or tensorflow
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "rossmann"))

import tritium.compat  # noqa: F401, I001 - horovod, where it is not installed

import flytekit
import generate
import horovod.spark.keras
import keras
import pandas as pd
import pyspark.sql
import torch
from features import CATEGORICAL, CONTINUOUS, Prepared, indexed, prepare, write_submission
from flytekit import Resources, task, workflow
from flytekit.types.directory import FlyteDirectory
from horovod.keras.callbacks import BestModelCheckpoint
from horovod.spark.common.backend import SparkBackend
from horovod.spark.common.store import Store
from model import exp_rmspe, make_model, scaled_sigmoid

from tritium.flyte.v1 import MPIJob, Spark

SPARK = Spark(
    spark_conf={
        "spark.driver.memory": "3g",
        "spark.executor.memory": "2000M",
        "spark.executor.cores": "1",
        "spark.executor.instances": "2",
        "spark.sql.shuffle.partitions": "16",
        "spark.ui.enabled": "false",
        "spark.log.level": "ERROR",
    }
)


@dataclass
class Hyperparameters:
    """What a training depends on, beside its rows."""

    num_proc: int = 2
    epochs: int = 10
    batch_size: int = 100
    learning_rate: float = 0.0001
    hidden: list[int] = field(default_factory=lambda: [1000, 1000, 1000, 500])


@task(cache=True, cache_version="0.2")
def fetch(stores: int, days: int) -> FlyteDirectory:
    """Return a folder of files like those of the competition, decided by a seed."""
    folder = Path(flytekit.current_context().working_directory) / "rossmann"
    generate.write(folder, stores=stores, days=days)
    return FlyteDirectory(str(folder))


@task(task_config=SPARK, cache=True, cache_version="0.2", requests=Resources(mem="1Gi"), limits=Resources(mem="1Gi"))
def horovod_spark_task(data_dir: FlyteDirectory, hp: Hyperparameters, work_dir: FlyteDirectory) -> FlyteDirectory:
    """Return a folder with the model and the file to hand in, of a training within this Spark application."""
    rossmann = indexed(prepare(flytekit.current_context().spark_session, place(data_dir)))
    working_dir = flytekit.current_context().working_directory
    keras_model = train(rossmann, hp, Store.create(place(work_dir)))
    keras_model.getModel().save(f"{working_dir}/model.keras")
    write_submission(keras_model.transform(rossmann.test), f"{working_dir}/submission.csv")
    return FlyteDirectory(working_dir)


def train(rossmann: Prepared, hp: Hyperparameters, store: Store) -> horovod.spark.keras.KerasModel:
    """Return the Spark transformer of the best epoch."""
    estimator = horovod.spark.keras.KerasEstimator(
        backend=SparkBackend(
            num_proc=hp.num_proc, stdout=sys.stdout, stderr=sys.stderr, prefix_output_with_timestamp=True
        ),
        store=store,
        model=make_model(rossmann.vocabulary, rossmann.max_sales, hp.hidden),
        optimizer=keras.optimizers.Adam(hp.learning_rate, epsilon=1e-3),
        loss="mae",
        metrics=[exp_rmspe],
        custom_objects={"exp_rmspe": exp_rmspe, "act_sigmoid_scaled": scaled_sigmoid(rossmann.max_sales)},
        feature_cols=CATEGORICAL + CONTINUOUS,
        label_cols=["Sales"],
        validation="Validation",
        batch_size=hp.batch_size,
        epochs=hp.epochs,
        checkpoint_callback=BestModelCheckpoint(monitor="val_exp_rmspe", mode="min", save_freq="epoch"),
        verbose=2,
    )
    return estimator.fit(rossmann.train).setOutputCols(["Sales_output"])


@task(task_config=SPARK, cache=True, cache_version="0.2")
def features(data_dir: FlyteDirectory) -> pyspark.sql.DataFrame:
    """Return the rows to train on."""
    return indexed(prepare(flytekit.current_context().spark_session, place(data_dir))).train


@task(
    task_config=MPIJob(num_workers=2, num_launcher_replicas=1, slots=1),
    requests=Resources(cpu="1", mem="3000Mi"),
    limits=Resources(cpu="2", mem="6000Mi"),
    retries=3,
    cache=True,
    cache_version="0.5",
)
def mpi_task(rows: pd.DataFrame, hp: Hyperparameters) -> float:
    """Return the competition's error of a small network of torch, trained by all ranks of mpirun."""
    import horovod.torch as hvd

    hvd.init()
    torch.manual_seed(0)
    numbers = rows[CATEGORICAL + CONTINUOUS].astype("float32")
    inputs = torch.tensor(((numbers - numbers.mean()) / (numbers.std() + 1e-6)).to_numpy())
    sales = torch.tensor(rows["Sales"].to_numpy("float32"))
    held_out = torch.tensor(rows["Validation"].to_numpy("bool"))
    net = torch.nn.Sequential(torch.nn.Linear(inputs.shape[1], 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    net[2].bias.data.fill_(float(sales.mean()))
    adam = torch.optim.Adam(net.parameters(), lr=hp.learning_rate * hvd.size())
    optimizer = hvd.DistributedOptimizer(adam, named_parameters=net.named_parameters())
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    x, y = inputs[~held_out], sales[~held_out]
    count = len(x) // hvd.size()  # As many on each rank, so that all take equally many steps.
    x, y = x[hvd.rank() :: hvd.size()][:count], y[hvd.rank() :: hvd.size()][:count]
    for _ in range(hp.epochs):
        for batch in torch.randperm(count).split(hp.batch_size):
            optimizer.zero_grad()
            torch.nn.functional.l1_loss(net(x[batch])[:, 0], y[batch]).backward()
            optimizer.step()
    with torch.no_grad():
        mine = torch.nonzero(held_out)[hvd.rank() :: hvd.size(), 0]
        squares = torch.expm1(net(inputs[mine])[:, 0] - sales[mine]).square().sum()
    total = hvd.allreduce(squares, op=hvd.Sum)
    hvd.shutdown()
    return float((total / held_out.sum()).sqrt())


@workflow
def rossmann(stores: int, days: int, hp: Hyperparameters, work_dir: FlyteDirectory) -> tuple[FlyteDirectory, float]:
    """Return the folder with model and submission, and the error of the network of the MPIJob."""
    data_dir = fetch(stores=stores, days=days)
    submission = horovod_spark_task(data_dir=data_dir, hp=hp, work_dir=work_dir)
    return submission, mpi_task(rows=features(data_dir=data_dir), hp=hp)


def place(directory: FlyteDirectory) -> str:
    """Return where a directory is that Spark reads: executors do not see what is downloaded to the driver."""
    return directory.remote_source or directory.path


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stores", type=int, default=1115)
    parser.add_argument("--days", type=int, default=942)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--learning-rate", type=float, default=0.0001)
    parser.add_argument("--hidden", type=int, nargs="+", default=[1000, 1000, 1000, 500])
    options = parser.parse_args()
    hp = Hyperparameters(epochs=options.epochs, learning_rate=options.learning_rate, hidden=options.hidden)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rossmann-") as folder:
        submission, error = rossmann(
            stores=options.stores, days=options.days, hp=hp, work_dir=FlyteDirectory(path=folder)
        )
    print(f"{submission.path}: MPIJob's RMSPE {error:.4f}; {time.monotonic() - began:.1f} s")


if __name__ == "__main__":
    main()
