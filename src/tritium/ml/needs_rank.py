"""Tells errors of the user's functions that a rank would have, too, from those of a function that needs a rank."""

from __future__ import annotations

import traceback
from collections.abc import Iterator

_OF_RANKS = ("torch.distributed", "torch.cuda", "jax.distributed", "tritium.gang.rank", "mpi4py", "horovod")


def needs_rank(error: BaseException) -> bool:
    """Return whether a function may have failed only as it was called outside a rank, so that nothing is known.

    It may need a library or a file that only the machines of the ranks have, their GPU, or the other ranks.
    """
    return any(_is_of_ranks(each) for each in _chain(error))


def text_of(error: BaseException) -> str:
    """Return the error's type and what it says: `ValueError: …`."""
    return f"{type(error).__name__}: {error}"


def _is_of_ranks(error: BaseException) -> bool:
    if isinstance(error, ImportError | OSError) or "CUDA" in str(error):
        return True
    homes = (str(frame.f_globals.get("__name__", "")) for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(home == root or home.startswith(f"{root}.") for home in homes for root in _OF_RANKS)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        yield error
        seen.append(error)
        error = error.__cause__ or error.__context__
