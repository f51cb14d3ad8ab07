"""The table prepared in Spark by hand, and TorchEstimator on the columns of numbers."""

from __future__ import annotations

import sys
from typing import Any

import tables


def fit(frame: Any, epochs: int) -> Any:
    import pandas as pd
    from pyspark.ml.feature import StringIndexer
    from pyspark.sql import functions as F

    from tritium.ml import TorchEstimator

    @F.pandas_udf("array<float>")
    def pixels(bodies: pd.Series) -> pd.Series:
        return bodies.map(lambda body: tables.decode(body).reshape(-1))

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
