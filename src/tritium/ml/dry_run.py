"""What the dry runs of all frameworks share: errors of the user's functions, and the trial in a rank (driver, rank)."""

from __future__ import annotations

import dataclasses
import random
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from tritium.model.signature import check_classes

if TYPE_CHECKING:
    from tritium.gang.rank.world import World
    from tritium.ml.backend import DryRun

_ACCELERATORS = re.compile(r"cuda|nccl|\bgpus?\b", re.IGNORECASE)
_OF_RANKS = ("torch.distributed", "torch.cuda", "jax.distributed", "tritium.gang.rank", "mpi4py", "horovod")


def needs_rank(error: BaseException) -> bool:
    """Return whether a function may have failed only as it was called outside a rank, so that nothing is known.

    It may need a library or a file that only the machines of the ranks have, their GPU, or the other ranks.
    """
    return any(_is_of_ranks(cause) for cause in _chain(error))


def text_of(error: BaseException) -> str:
    """Return the error's type and what it says: `ValueError: …`."""
    return f"{type(error).__name__}: {error}"


def _is_of_ranks(error: BaseException) -> bool:
    if isinstance(error, ImportError | OSError) or _ACCELERATORS.search(str(error)):
        return True
    homes = (str(frame.f_globals.get("__name__", "")) for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(home == root or home.startswith(f"{root}.") for home in homes for root in _OF_RANKS)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        yield error
        seen.append(error)
        error = error.__cause__ or error.__context__


@contextmanager
def same_random_state() -> Iterator[None]:
    """Restore the states of Python's, NumPy's and, where it is imported, torch's generator after the block."""
    torch = sys.modules.get("torch")
    before = random.getstate(), np.random.get_state(), None if torch is None else torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        if torch is not None:
            torch.set_rng_state(before[2])


def try_first_row(kind: type[DryRun[Any]], settings: Any, world: World) -> Any:
    """Make the dry run for the shapes that the first row of rank 0 shows, and return its facts. A collective call.

    None where rank 0 has no row.

    For trainings of which the driver did not know the shapes: what can't be trained fails with the errors that it has
    on the driver, on rank 0 alone, before any rank begins.
    """
    row, facts = world.shard("train").first_row() if world.rank == 0 else None, None
    if row is not None:
        fields = {
            field.name: dataclasses.replace(field, dtype=row[field.name].dtype.name, shape=row[field.name].shape[1:])
            for field in world.shard("train").schema
        }
        shapes = {name: field.shape or () for name, field in fields.items()}
        labels = {name: fields[name] for name in settings.label_sources()}
        make: Any = kind
        with same_random_state():
            dry_run = make(settings, fields, shapes)
            if settings.task == "classification" and dry_run.outputs is not None:
                check_classes(dry_run.outputs)
            facts = dry_run.train(settings, labels, {name: shapes[name] for name in labels})
    return world.gather(facts)[0]
