"""Ops with the numbers of ranks, which are asked for when they run (rank)."""

from __future__ import annotations

from typing import Any

from tritium_compat.horovod import context
from tritium_compat.horovod.tensorflow.calls import now


def rank_op(name: str | None = None) -> Any:
    """Return an op with the number of this rank."""
    return now(lambda: context.current().rank)


def local_rank_op(name: str | None = None) -> Any:
    """Return an op with the number of this rank on its host."""
    return now(lambda: context.current().local_rank)


def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return an op with the number of ranks of a process set."""
    return now(lambda: len(_ranks(process_set_id)))


def local_size_op(name: str | None = None) -> Any:
    """Return an op with the number of ranks on this host."""
    return now(lambda: context.current().local_size)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return an op with 1 if this rank is in a process set, else 0."""
    return now(lambda: int(context.current().rank in _ranks(process_set_id)))


def _ranks(number: int) -> tuple[int, ...]:
    sets = context.current().sets
    if number not in sets:
        raise ValueError(f"There is no process set {number}; those there are: {sorted(sets)}.")
    return sets[number]
