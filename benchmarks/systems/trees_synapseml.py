"""SynapseML's LightGBM, streamed, two tasks; its jars come from Maven at the first run (pyspark 3.5)."""

from __future__ import annotations

import sys
from typing import Any

import growing
import work

JARS = {
    "spark.jars.packages": "com.microsoft.azure:synapseml-lightgbm_2.12:1.0.11",
    "spark.jars.excludes": "commons-logging:commons-logging",  # Spark has it
}


def fit(frame: Any, iterations: int) -> growing.Grown:
    from pyspark.ml.feature import VectorAssembler
    from synapse.ml.lightgbm import LightGBMRegressor

    model = LightGBMRegressor(
        featuresCol="features",
        labelCol=work.LABEL,
        numIterations=iterations,
        numLeaves=growing.LEAVES,
        maxBin=growing.BINS,
        learningRate=growing.RATE,
        numTasks=work.RANKS,
        numThreads=1,
        dataTransferMode="streaming",
    ).fit(VectorAssembler(inputCols=work.FEATURES, outputCol="features").transform(frame))
    text = model.getNativeModel()

    def predict(x: Any) -> Any:
        import lightgbm

        return lightgbm.Booster(model_str=text).predict(x)

    return growing.Grown(predict)


if __name__ == "__main__":
    sys.exit(growing.main(fit, "synapseml", **JARS))
