"""horovod.spark's TorchEstimator over a LocalStore (pyspark 3.5), by its own loop."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from typing import Any

import work


def fit(frame: Any, epochs: int) -> work.Fitted:
    import torch
    from horovod.spark.common.backend import SparkBackend
    from horovod.spark.common.store import LocalStore
    from horovod.spark.torch import TorchEstimator

    torch.manual_seed(0)
    net = work.make_net()
    with tempfile.TemporaryDirectory(prefix="store-") as folder, contextlib.redirect_stdout(sys.stderr):
        model = TorchEstimator(
            backend=SparkBackend(num_proc=work.RANKS, use_gloo=True, use_mpi=False, verbose=0),
            store=LocalStore(folder),
            model=net,
            optimizer=torch.optim.Adam(net.parameters(), lr=work.RATE),
            loss=torch.nn.MSELoss(),
            input_shapes=[[-1, work.WIDTH]],
            feature_cols=["x"],
            label_cols=[work.LABEL],
            batch_size=work.BATCH,
            epochs=epochs,
            use_gpu=False,
            verbose=0,
        ).fit(work.packed(frame))
    return work.Fitted(work.layers_of(model.getModel()), None, None, {})


if __name__ == "__main__":
    sys.exit(work.main(fit, "horovod", "petastorm", "torch", "pyarrow"))
