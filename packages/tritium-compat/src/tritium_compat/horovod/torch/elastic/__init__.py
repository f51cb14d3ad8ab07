"""`horovod.torch.elastic`: `run`, `TorchState` and `ElasticSampler` (rank)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tritium import world
from tritium_compat.horovod import basics
from tritium_compat.horovod.elastic import run_fn
from tritium_compat.horovod.torch.elastic.sampler import ElasticSampler
from tritium_compat.horovod.torch.elastic.state import TorchState


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function whose first argument is a state: it continues from the last commit, see `run_fn`."""
    return run_fn(func, reset)


def reset() -> None:
    """Connect the ranks again, once all have come here. Where one is lost, Tritium ends all and starts them again."""
    basics.shutdown()
    if world().run_id:
        world().barrier()
    basics.init()


__all__ = ["ElasticSampler", "TorchState", "run"]
