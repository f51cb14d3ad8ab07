"""`tritium new`: write a small project that trains on a table, tests itself, and scores (driver)."""

from __future__ import annotations

from pathlib import Path

import click

_TRAIN = '''"""Train a network on a table, save it, and score the table: python train.py [table.csv]"""

import sys

import torch
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from tritium.ml import TorchEstimator

FEATURES = ["x", "y"]
LABEL = "z"


def example(spark):
    """Return a table to begin with; read your own in its place."""
    table = spark.range(4_000).select(F.rand(1).alias("x"), F.rand(2).alias("y"))
    return table.withColumn(LABEL, 3 * F.col("x") - F.col("y"))


def make_net():
    return torch.nn.Sequential(torch.nn.Linear(len(FEATURES), 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))


def settings():
    """Return what is trained, and how; the test trains with the same."""
    return {
        "model": make_net,
        "loss": torch.nn.MSELoss(),
        "optimizer": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        "feature_cols": FEATURES,
        "label_cols": [LABEL],
        "normalize": True,
        "validation": 0.1,
        "epochs": 5,
    }


def main():
    spark = SparkSession.builder.appName("%(name)s").getOrCreate()
    if len(sys.argv) > 1:
        table = spark.read.csv(sys.argv[1], header=True, inferSchema=True)
    else:
        table = example(spark)
    model = TorchEstimator(**settings(), ranks=2).fit(table)
    print("validation loss:", model.history[-1]["validation_loss"])
    model.write().overwrite().save("model")
    model.transform(table).show(5)


if __name__ == "__main__":
    main()
'''
_TEST = '''"""The network learns, without Spark: pytest"""

import numpy as np
import pandas as pd
from tritium.ml import fit

from train import FEATURES, LABEL, settings


def test_it_learns():
    table = pd.DataFrame(np.random.default_rng(0).random((1_000, len(FEATURES))), columns=FEATURES)
    table[LABEL] = 3 * table["x"] - table["y"]
    model = fit(table, on="here", progress=False, **settings())
    assert model.history[-1]["validation_loss"] < model.history[0]["validation_loss"] / 2
    assert model.predict(table.drop(columns=LABEL)).shape == (1_000,)
'''
_README = """# %(name)s

```sh
python -m venv .venv && .venv/bin/pip install -r requirements.txt
PYSPARK_PYTHON=.venv/bin/python .venv/bin/python train.py        # two ranks on this machine
.venv/bin/python -m pytest                                       # without Spark
spark-submit --master spark://HOST:7077 train.py table.csv       # on a cluster
```

- `train.py`: name your columns in FEATURES and LABEL, and your network in `make_net`.
- Executors need torch, pyarrow and numpy; Tritium goes along with the job.
- `tritium doctor` says what is missing, `tritium report RUN_DIR` what happened.
"""
_FILES = {
    "train.py": _TRAIN,
    "test_train.py": _TEST,
    "requirements.txt": "tritium[spark,torch]\npytest\n",
    "README.md": _README,
}


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), metavar="NAME")
def new(folder: Path) -> None:
    """Write a small project into the new directory NAME: a training, its test, requirements and a README."""
    if folder.exists() and any(folder.iterdir()):
        raise click.UsageError(f"{folder} is there, and not empty. Name another directory.")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in _FILES.items():
        (folder / name).write_text(text.replace("%(name)s", folder.resolve().name), encoding="utf-8")
    click.echo(f"{folder} has {', '.join(_FILES)}. Next: cd {folder}, then python train.py")
