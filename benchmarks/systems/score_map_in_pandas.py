"""mapInPandas over the array column: the function that a user writes who wants the other columns kept."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import scoring


def score(frames: Iterator[Any]) -> Iterator[Any]:
    import numpy as np
    import torch

    torch.set_num_threads(1)
    net = scoring.net()
    with torch.inference_mode():
        for frame in frames:
            x = torch.from_numpy(np.stack(frame["features"].to_numpy()))
            yield frame.assign(prediction=net(x)[:, 0].numpy().astype(np.float64))


def transform(frame: Any) -> Any:
    return frame.mapInPandas(score, "id long, text string, features array<float>, prediction double")


if __name__ == "__main__":
    sys.exit(scoring.main(scoring.of_spark(transform, "array"), "pyspark", "torch", "pyarrow"))
