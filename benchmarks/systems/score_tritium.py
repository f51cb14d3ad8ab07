"""Tritium's TorchModel.transform over the array column."""

from __future__ import annotations

import sys
from typing import Any

import scoring
import work


def transform(frame: Any) -> Any:
    import tritium as tr
    from tritium.ml import TorchModel
    from tritium.model.signature import Input, Output, Signature

    signature = Signature(
        (Input("x", ("features",), "float32", (work.WIDTH,)),), (Output("y", shape=(1,)),), "regression"
    )
    return TorchModel(tr.Model(scoring.net(), signature), batch_size=scoring.BATCH).transform(frame)


if __name__ == "__main__":
    sys.exit(scoring.main(scoring.of_spark(transform, "array"), "pyspark", "torch", "pyarrow"))
