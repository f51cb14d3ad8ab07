"""TorchDistributor.run in two barrier tasks; `launch_torch_distributor.py local`: local_mode=True, on the driver."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import launching
import work


def launch(function: Callable[[], int]) -> Any:
    from pyspark.ml.torch.distributor import TorchDistributor

    return TorchDistributor(num_processes=work.RANKS, local_mode=LOCAL, use_gpu=False).run(function)


if __name__ == "__main__":
    if LOCAL := "local" in sys.argv:
        sys.argv.remove("local")
    work.prepare()
    work.session()
    sys.exit(launching.main(launch, "pyspark", "torch"))
