"""Rossmann's sales as a Flyte workflow: files, features by Spark, a Keras model on a gang, a submission; all cached.

    python rossmann.py --stores 20 --days 500 --epochs 3 --hidden 64 32

The steps of Flyte's own example with Horovod (2021) on Flyte 2. Features and network are those of ../rossmann. Runs in
this process, without a backend.
"""

import argparse
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

os.environ.setdefault("DO_NOT_TRACK", "1")  # Flyte's client reports errors to its makers otherwise
os.environ.setdefault("KERAS_BACKEND", "torch")  # or jax, or tensorflow
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "rossmann"))

import flyte
import generate
import keras
import numpy as np
from features import CATEGORICAL, CONTINUOUS, prepare, write_submission
from flyte.io import Dir, File
from model import ExpRMSPE, make_model

import tritium as tr
from tritium.flyte import Gang, SavedModel, Spark, Table, cache, run_dir, session
from tritium.ml import EarlyStopping, KerasEstimator, KerasModel

RANKS = 2
CONF = {"spark.driver.memory": "3g", "spark.ui.enabled": False, "spark.log.level": "ERROR"}
files_env = flyte.TaskEnvironment("files", cache=cache())
spark_env = flyte.TaskEnvironment("spark", plugin_config=Spark(CONF), cache=cache())
gang_env = flyte.TaskEnvironment("gang", plugin_config=Gang(ranks=RANKS, spark=Spark(CONF)), cache=cache())
workflow = flyte.TaskEnvironment("rossmann", depends_on=[files_env, spark_env, gang_env])


@dataclass
class Hyperparameters:
    """What a training depends on, beside its rows."""

    epochs: int = 10
    batch_size: int = 100
    learning_rate: float = 0.0002
    hidden: list[int] = field(default_factory=lambda: [1000, 1000, 1000, 500])


@files_env.task
async def fetch(stores: int, days: int) -> Dir:
    """Return a folder of files like those of the competition, decided by a seed."""
    folder = tempfile.mkdtemp(prefix="rossmann-")
    generate.write(folder, stores=stores, days=days)
    return await Dir.from_local(folder)


@spark_env.task
def features(files: Dir) -> tuple[Table, Table, Table, int]:
    """Return the rows to train on, their sales alone, those to predict, and the sales of the best day."""
    rossmann = prepare(session(), files.path)
    tables = rossmann.train, rossmann.train.select("Sales"), rossmann.test
    return *map(Table.written, tables), int(rossmann.max_sales)


@gang_env.task(retries=2)
def guessed(rows: Table, batch_size: int) -> float:
    """Return the competition's error of a plain guess, the mean: on every rank, `rows` is its shard."""
    sales = [np.asarray(batch["Sales"]) for epoch in rows.epochs(1, batch_size=batch_size) for batch in epoch]
    sums = tr.world().gather((sum(float(part.sum()) for part in sales), sum(map(len, sales))))
    mean = sum(total for total, _ in sums) / sum(count for _, count in sums)
    squares = tr.world().gather(sum(float(np.square(np.exp(mean - part) - 1).sum()) for part in sales))
    return (sum(squares) / sum(count for _, count in sums)) ** 0.5


@spark_env.task(retries=2)
def train(rows: Table, max_sales: int, hyper: Hyperparameters) -> tuple[SavedModel, float]:
    """Return the model of the best epoch, and its error. The next attempt goes on from the newest checkpoint."""
    estimator = KerasEstimator(
        model=partial(make_model, max_sales=max_sales, hidden=hyper.hidden),
        optimizer=keras.optimizers.Adam(hyper.learning_rate, epsilon=1e-3),
        loss="mae",
        metrics=[ExpRMSPE()],
        feature_cols={name: name for name in CATEGORICAL + CONTINUOUS},
        label_cols=["Sales"],
        vocabulary=CATEGORICAL,
        unknown_words="keep",
        validation="Validation",
        early_stopping=EarlyStopping(monitor="validation_exp_rmspe", patience=20),
        batch_size=hyper.batch_size,
        epochs=hyper.epochs,
        ranks=RANKS,
        run_dir=run_dir(),
    )
    model = estimator.fit(rows.read())
    return SavedModel.of(model), min(epoch["validation_exp_rmspe"] for epoch in model.history)


@spark_env.task
async def submission(rows: Table, model: SavedModel) -> File:
    """Return the file to hand in."""
    scored = KerasModel(model.load(trusted=True)).setOutputCols(["Sales_output"]).transform(rows.read())
    path = Path(tempfile.mkdtemp(prefix="rossmann-")) / "submission.csv"
    write_submission(scored, str(path))
    return await File.from_local(str(path))


@workflow.task
async def rossmann(stores: int, days: int, hyper: Hyperparameters) -> tuple[File, float, float]:
    """Return the submission, the error of its model, and that of a plain guess."""
    rows, sales, asked, max_sales = await features.aio(await fetch.aio(stores, days))
    model, error = await train.aio(rows, max_sales, hyper)
    return await submission.aio(asked, model), error, await guessed.aio(sales, 1000)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stores", type=int, default=1115)
    parser.add_argument("--days", type=int, default=942)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--learning-rate", type=float, default=0.0002)
    parser.add_argument("--hidden", type=int, nargs="+", default=[1000, 1000, 1000, 500])
    options = parser.parse_args()
    flyte.init(local_persistence=True)
    hyper = Hyperparameters(options.epochs, learning_rate=options.learning_rate, hidden=options.hidden)
    began = time.monotonic()
    file, error, guess = flyte.run(rossmann, options.stores, options.days, hyper).outputs()
    print(f"{file.path}: RMSPE {error:.4f}, of the mean {guess:.4f}; {time.monotonic() - began:.1f} s")


if __name__ == "__main__":
    main()
