"""mlflow.pyfunc.spark_udf of a logged torch model, over a struct of the 64 columns, as its documentation shows it."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import scoring
import work


def transform(frame: Any) -> Any:
    from pyspark.sql import functions as F

    return frame.withColumn("prediction", udf_of(frame.sparkSession)(F.struct(*work.FEATURES)))


def udf_of(spark: Any) -> Any:
    import mlflow.pyfunc
    import mlflow.pytorch

    path = Path(FOLDER, "model")
    if not path.exists():
        mlflow.pytorch.save_model(scoring.net(), str(path), serialization_format="pickle")
    return mlflow.pyfunc.spark_udf(spark, str(path), result_type="double", env_manager="local")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="model-") as FOLDER:
        code = scoring.main(scoring.of_spark(transform, "columns"), "pyspark", "mlflow-skinny", "torch", "pyarrow")
    sys.exit(code)
