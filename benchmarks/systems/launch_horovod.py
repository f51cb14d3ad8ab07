"""horovod.spark.run: horovod's own Gloo group is formed by hvd.init, and adds up by hvd.allreduce."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import launching
import work


def group() -> int:
    import horovod.torch as hvd
    import torch

    hvd.init()
    return int(hvd.allreduce(torch.ones(1), op=hvd.Sum))


def launch(function: Callable[[], int]) -> Any:
    import horovod.spark

    its = group if function is launching.group else function
    return horovod.spark.run(its, num_proc=work.RANKS, use_gloo=True, use_mpi=False, verbose=0)[0]


if __name__ == "__main__":
    work.prepare()
    work.session()
    sys.exit(launching.main(launch, "pyspark", "horovod", "torch"))
