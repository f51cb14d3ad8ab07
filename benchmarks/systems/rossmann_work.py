"""The work of rossmann.py for every system: the network of examples/rossmann/model.py, in Keras 2 or 3, and its error.

A system is a script beside this one with `fit(frame, epochs, facts) -> Keras model`, given to `main`: it is called for
a few rows first, so that the session is warm, and then for all of them with the clock running, from the DataFrame in
hand to the model in hand. The features lie in Parquet, as rossmann_features.py wrote them. All take Adam at 2e-4 for 2
ranks, 100 rows a batch and rank, and keep the weights of the epoch with the least validation error.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import work

BATCH, RATE, LABEL = 100, 2e-4, "Sales"
HIDDEN = (1000, 1000, 1000, 500)
WARM_ROWS = 4000


def ops(keras: Any) -> Any:
    """Return what Keras 3 calls ops; in Keras 2, TensorFlow, whose names are the same for what is needed here."""
    if hasattr(keras, "ops"):
        return keras.ops
    import tensorflow

    return tensorflow


def custom_objects(keras: Any, facts: dict[str, Any]) -> dict[str, Any]:
    """Return the activation of the last layer and the metric, by their names."""
    top, of = 1.2 * math.log(facts["max_sales"]), ops(keras)
    mean = getattr(of, "reduce_mean", None) or of.mean

    def act_sigmoid_scaled(x: Any) -> Any:
        return of.sigmoid(x) * top

    def exp_rmspe(y_true: Any, y_pred: Any) -> Any:
        return of.sqrt(mean(of.square(of.exp(y_pred - y_true) - 1)))

    return {"act_sigmoid_scaled": act_sigmoid_scaled, "exp_rmspe": exp_rmspe}


def make_model(keras: Any, facts: dict[str, Any]) -> Any:
    """Return the network; each column is an input by its name."""
    layers, small = keras.layers, keras.regularizers.L2(0.00005)
    words, numbers = facts["words"], facts["continuous"]
    inputs = {name: keras.Input((1,), name=name) for name in [*words, *numbers]}
    embeddings = [layers.Embedding(count + 1, 10, name=f"emb_{name}")(inputs[name]) for name, count in words.items()]
    scaled = layers.BatchNormalization()(layers.Concatenate()([inputs[name] for name in numbers]))
    x = layers.Concatenate()([layers.Flatten()(layers.Concatenate()(embeddings)), scaled])
    for width in HIDDEN:
        x = layers.Dense(width, "relu", kernel_regularizer=small)(x)
    output = layers.Dense(1, custom_objects(keras, facts)["act_sigmoid_scaled"])(layers.Dropout(0.5)(x))
    return keras.Model([inputs[name] for name in [*words, *numbers]], output)


def columns(facts: dict[str, Any]) -> list[str]:
    """Return the features in the order of the model's inputs."""
    return [*facts["words"], *facts["continuous"]]


def rmspe(model: Any, rows: Any, facts: dict[str, Any]) -> float:
    """Return the competition's error over the rows to validate on, of what the model predicts of them."""
    inputs = [rows[[name]].to_numpy() for name in columns(facts)]
    guessed = np.asarray(model.predict(inputs, batch_size=4096, verbose=0), "float64").reshape(-1)
    return float(np.sqrt(np.mean(np.expm1(guessed - rows[LABEL].to_numpy("float64")) ** 2)))


def main(fit: Callable[[Any, int, dict[str, Any]], Any], *packages: str, **conf: str) -> int:
    """Run a system once and print what was measured as one line of JSON, the last of the output."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()
    facts = json.loads(Path(options.folder, "facts.json").read_text(encoding="utf-8"))
    work.prepare()
    spark = work.session(**conf)
    frame = spark.read.parquet(f"{options.folder}/train")
    held, rest = (frame.where(f"{negated}Validation").limit(WARM_ROWS // 2) for negated in ("", "not "))
    fit(held.union(rest).repartition(4), 1, facts)  # horovod.spark needs rows of both for every rank
    began = time.perf_counter()
    model = fit(frame, options.epochs, facts)
    seconds = time.perf_counter() - began
    rows = frame.where("Validation").toPandas()
    spark.stop()
    found = {"seconds": seconds, "rmspe": rmspe(model, rows, facts), "versions": work.versions("pyspark", *packages)}
    print(json.dumps(found), flush=True)
    return 0
