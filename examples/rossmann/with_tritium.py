"""Forecast Rossmann's sales with Tritium's KerasEstimator, from CSV files to a submission.

python generate.py data && python with_tritium.py data
"""

import argparse
import os
import sys
import time
from functools import partial

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
os.environ.setdefault("KERAS_BACKEND", "torch")  # or jax, or tensorflow

import keras
from features import CATEGORICAL, CONTINUOUS, prepare, write_submission
from model import HIDDEN, ExpRMSPE, make_model
from pyspark.sql import SparkSession

from tritium.ml import EarlyStopping, KerasEstimator


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", help="the folder of the CSV files")
    parser.add_argument("--submission", default="submission.csv")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=100, help="of a rank")
    parser.add_argument("--learning-rate", type=float, default=0.0002)
    parser.add_argument("--sample", type=float, help="a share of the rows to train on, for a quick look")
    parser.add_argument("--hidden", type=int, nargs="+", default=HIDDEN, help="the widths of the dense layers")
    options = parser.parse_args()

    spark = SparkSession.builder.master(f"local[{options.ranks}]").config("spark.driver.memory", "3g").getOrCreate()
    began = time.monotonic()
    rossmann = prepare(spark, options.data, options.sample)
    print(f"features prepared in {time.monotonic() - began:.0f} s")

    estimator = KerasEstimator(
        model=partial(make_model, max_sales=rossmann.max_sales, hidden=options.hidden),
        optimizer=keras.optimizers.Adam(options.learning_rate, epsilon=1e-3),
        loss="mae",
        metrics=[ExpRMSPE()],
        feature_cols={name: name for name in CATEGORICAL + CONTINUOUS},
        label_cols=["Sales"],
        vocabulary=CATEGORICAL,  # their words are learnt from the rows, and make_model gets them
        unknown_words="keep",
        validation="Validation",
        early_stopping=EarlyStopping(monitor="validation_exp_rmspe", patience=20),  # and the best weights are kept
        batch_size=options.batch_size,
        epochs=options.epochs,
        ranks=options.ranks,
    )
    began = time.monotonic()
    model = estimator.fit(rossmann.train).setOutputCols(["Sales_output"])
    best = min(epoch["validation_exp_rmspe"] for epoch in model.history)
    print(f"trained in {time.monotonic() - began:.0f} s, best RMSPE {best:.4f}")

    began = time.monotonic()
    rows = write_submission(model.transform(rossmann.test), options.submission)
    print(f"{rows:,} predictions in {time.monotonic() - began:.0f} s: {options.submission}")


if __name__ == "__main__":
    main()
