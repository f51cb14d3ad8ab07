"""The table prepared in Spark by hand, and TorchEstimator on the columns of numbers.

The images are decoded by an `arrow_udf` that returns one flat array a batch: a `pandas_udf` that returns a Series of
arrays takes four times as long.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pyarrow as pa  # of the hints of an arrow_udf, which are looked up in the module
import tables


def fit(frame: Any, epochs: int) -> Any:
    from pyspark.ml.feature import StringIndexer
    from pyspark.sql import functions as F

    from tritium.ml import TorchEstimator

    @F.arrow_udf("array<float>")
    def pixels(bodies: pa.Array) -> pa.Array:
        flat = np.stack([tables.decode(body.as_py()).reshape(-1) for body in bodies])
        return pa.ListArray.from_arrays(np.arange(len(flat) + 1, dtype="int32") * flat.shape[1], flat.reshape(-1))

    indexer = StringIndexer(inputCol="word", outputCol="index").fit(frame)
    words = len(indexer.labels)
    ready = indexer.transform(frame).fillna({"number": 0.0})
    ready = ready.select(F.col("index").cast("long").alias("word"), "number", pixels("image").alias("image"), "y")
    return TorchEstimator(
        model=lambda: tables.make_net(words),
        feature_cols={"word": "word", "number": ["number"], "image": "image"},
        **tables.settings(epochs),
    ).fit(ready)


if __name__ == "__main__":
    sys.exit(tables.main(fit))
