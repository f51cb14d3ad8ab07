"""Ray Data's map_batches with a class in two actors, over the array column; the result is iterated over and dropped."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import scoring
import work


class Predictor:
    def __init__(self) -> None:
        import torch

        torch.set_num_threads(1)
        self.net = scoring.net()

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        import numpy as np
        import torch

        with torch.inference_mode():
            x = torch.from_numpy(np.stack(list(batch["features"])))
            return {**batch, "prediction": self.net(x)[:, 0].numpy().astype(np.float64)}


def system(folder: str) -> tuple[Callable[[], object], Callable[[], float]]:
    import ray.data

    work.init_ray()

    def scored() -> Any:
        rows = ray.data.read_parquet(f"{folder}/array")
        return rows.map_batches(Predictor, batch_size=scoring.BATCH, concurrency=work.RANKS, num_cpus=0.5)

    def into_nothing() -> None:
        for _ in scored().iter_internal_ref_bundles():
            pass

    return into_nothing, lambda: float(scored().mean("prediction"))


if __name__ == "__main__":
    sys.exit(scoring.main(system, "ray", "torch", "pyarrow"))
