"""Forecast Rossmann's sales with horovod.spark's KerasEstimator, called as ever; one import line makes it Tritium's.

    python generate.py data && python with_horovod_spark.py data

Where horovod itself is installed, that line changes nothing. with_tritium.py does the same with Tritium's own.
"""

import argparse
import os
import sys
import tempfile
import time

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
os.environ.setdefault("KERAS_BACKEND", "torch")  # or jax, or tensorflow

import tritium.compat  # noqa: F401, I001 - makes what follows importable

import horovod.spark.keras as hvd
import keras
from features import CATEGORICAL, CONTINUOUS, indexed, prepare, write_submission
from horovod.keras.callbacks import BestModelCheckpoint
from horovod.spark.common.backend import SparkBackend
from horovod.spark.common.store import Store
from model import HIDDEN, exp_rmspe, make_model, scaled_sigmoid
from pyspark.sql import SparkSession


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", help="the folder of the CSV files")
    parser.add_argument("--submission", default="submission.csv")
    parser.add_argument("--work-dir", help="of the Store; a temporary one by default")
    parser.add_argument("--num-proc", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=100, help="of a process")
    parser.add_argument("--learning-rate", type=float, default=0.0001, help="which is multiplied by the processes")
    parser.add_argument("--sample", type=float, help="a share of the rows to train on, for a quick look")
    parser.add_argument("--hidden", type=int, nargs="+", default=HIDDEN, help="the widths of the dense layers")
    options = parser.parse_args()

    spark = SparkSession.builder.master(f"local[{options.num_proc}]").config("spark.driver.memory", "3g").getOrCreate()
    began = time.monotonic()
    rossmann = indexed(prepare(spark, options.data, options.sample))
    print(f"features prepared in {time.monotonic() - began:.0f} s")

    activation = scaled_sigmoid(rossmann.max_sales)
    with tempfile.TemporaryDirectory(prefix="rossmann-") as folder:
        estimator = hvd.KerasEstimator(
            backend=SparkBackend(
                num_proc=options.num_proc, stdout=sys.stdout, stderr=sys.stderr, prefix_output_with_timestamp=True
            ),
            store=Store.create(options.work_dir or folder),
            model=make_model(rossmann.vocabulary, rossmann.max_sales, options.hidden),
            optimizer=keras.optimizers.Adam(options.learning_rate, epsilon=1e-3),
            loss="mae",
            metrics=[exp_rmspe],
            custom_objects={"exp_rmspe": exp_rmspe, "act_sigmoid_scaled": activation},
            feature_cols=CATEGORICAL + CONTINUOUS,
            label_cols=["Sales"],
            validation="Validation",
            batch_size=options.batch_size,
            epochs=options.epochs,
            checkpoint_callback=BestModelCheckpoint(monitor="val_exp_rmspe", mode="min", save_freq="epoch"),
            verbose=2,
        )
        began = time.monotonic()
        model = estimator.fit(rossmann.train).setOutputCols(["Sales_output"])
    best = min(model.getHistory()["val_exp_rmspe"])
    print(f"trained in {time.monotonic() - began:.0f} s, best RMSPE {best:.4f}")

    began = time.monotonic()
    rows = write_submission(model.transform(rossmann.test), options.submission)
    print(f"{rows:,} predictions in {time.monotonic() - began:.0f} s: {options.submission}")


if __name__ == "__main__":
    main()
