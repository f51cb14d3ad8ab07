"""pyspark's predict_batch_udf over the array column, with one thread a task as two tasks share two cores."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import scoring
import work


def make() -> Callable[[Any], Any]:
    import numpy as np
    import torch

    torch.set_num_threads(1)
    net = scoring.net()

    def predict(inputs: Any) -> Any:
        with torch.inference_mode():
            return net(torch.from_numpy(inputs))[:, 0].numpy().astype(np.float64)

    return predict


def transform(frame: Any) -> Any:
    from pyspark.ml.functions import predict_batch_udf
    from pyspark.sql.types import DoubleType

    udf = predict_batch_udf(
        make, return_type=DoubleType(), batch_size=scoring.BATCH, input_tensor_shapes=[[work.WIDTH]]
    )
    return frame.withColumn("prediction", udf("features"))


if __name__ == "__main__":
    sys.exit(scoring.main(scoring.of_spark(transform, "array"), "pyspark", "torch", "pyarrow"))
