"""Old code on a Spark session: HorovodRunner, horovod.spark.run and run_elastic, TorchDistributor."""

from __future__ import annotations

import importlib
import io
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tritium.errors import BadSetting, NotEnoughSlots

pytestmark = pytest.mark.timeout(300)


def main(factor: float) -> Any:
    import horovod.torch as hvd
    import torch

    hvd.init()
    print(f"printed by {hvd.rank()}")
    return hvd.rank(), hvd.allreduce(torch.ones(1), op=hvd.Sum).item() * factor


def test_the_cluster_runs_old_code(spark: SparkSession) -> None:
    import tritium.compat

    horovod = importlib.import_module("horovod")
    importlib.import_module("horovod.spark")
    runner = importlib.import_module("sparkdl").HorovodRunner
    assert tritium.compat.status()["sparkdl"] == "tritium_compat.sparkdl"
    assert runner(np=2).run(main, factor=2.0) == (0, 4.0)
    with pytest.raises(NotEnoughSlots, match="50"):
        runner(np=50).run(main, factor=2.0)
    out = io.StringIO()
    results = horovod.spark.run(main, args=(0.5,), num_proc=2, stdout=out, verbose=0, nics={"lo"})
    assert results == [(0, 1.0), (1, 1.0)]
    assert "printed by 1" in out.getvalue()
    assert horovod.spark.run_elastic(main, args=(0.5,), min_num_proc=1, max_num_proc=2) == [(0, 1.0), (1, 1.0)]
    with pytest.raises(BadSetting, match=r"horovod.spark.run\(use_mpi=…\): ranks find each other without MPI"):
        horovod.spark.run(main, args=(0.5,), num_proc=2, use_mpi=True)
    distributor = tritium.compat.TorchDistributor(2, local_mode=False, use_gpu=False)
    assert distributor.run(main, 1.0) == (0, 2.0)
