"""`init`, `shutdown`, ranks and sizes: the state that one process has of Horovod (rank)."""

from __future__ import annotations

import atexit
import itertools
import os
from collections.abc import Sequence
from typing import Any

import torch

from tritium_compat.horovod.engine import Engine
from tritium_compat.horovod.groups import PATIENCE, Groups, dist

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_generation = itertools.count()


class Context:
    """A process of a gang from `init` to `shutdown`. Outside a gang it is one rank, as in Horovod."""

    def __init__(self) -> None:
        given = [name for name in _VARIABLES if name in os.environ]
        if given and len(given) < len(_VARIABLES):
            missing = ", ".join(name for name in _VARIABLES if name not in given)
            raise ValueError(
                f"Of the variables by which ranks find each other, {missing} is missing. Run this function by "
                "tr.launch, or this script by tritium run."
            )
        self.size = int(os.environ["WORLD_SIZE"]) if given else 1
        self.rank = int(os.environ["RANK"]) if given else 0
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        number = next(_generation)
        self._store: Any = None
        if self.size > 1:
            store = next(dist.rendezvous("env://", timeout=PATIENCE))[0]
            self._store = dist.PrefixStore(f"horovod {number}", store)
        places = self._places()
        across = [rank for rank, (local, _) in enumerate(places) if local == self.local_rank]
        self.cross_rank, self.cross_size = across.index(self.rank), len(across)
        self.homogeneous = len({size for _, size in places}) == 1
        self.sets: dict[int, tuple[int, ...]] = {0: tuple(range(self.size))}
        self._engines = {0: Engine(self.sets[0], self.rank, self._store, "collectives")}
        self._numbers = itertools.count(1)
        self._names: dict[str, itertools.count[int]] = {}
        atexit.register(self._at_exit)

    def _places(self) -> list[tuple[int, int]]:
        """Return local rank and local size of every rank."""
        groups = Groups(self._store, "places", self.rank, self.size)
        own = torch.tensor([self.local_rank, self.local_size])
        return [(int(part[0]), int(part[1])) for part in groups.gather(own)]

    def engine(self, number: int) -> Engine:
        """Return the engine of a process set. Raises ValueError where this rank is not in it."""
        if number not in self.sets:
            raise ValueError(f"There is no process set {number}; those there are: {sorted(self.sets)}.")
        if number not in self._engines:
            raise ValueError(
                f"Rank {self.rank} is not in process set {number}, which has the ranks {list(self.sets[number])}. Ask "
                "process_set.included() before."
            )
        return self._engines[number]

    def name(self, kind: str) -> str:
        """Return a name for a collective that was given none: ranks must call these in the same order."""
        return f"noname.{next(self._names.setdefault(kind, itertools.count()))}"

    def names_anew(self) -> None:
        """Begin to count collectives without a name from 0, which all ranks must do."""
        self._names.clear()

    def add_set(self, ranks: Sequence[int]) -> int:
        """Add a process set, which all ranks must do in the same order, and return its number."""
        number = next(self._numbers)
        self.sets[number] = tuple(ranks)
        if self.rank in ranks:
            self._engines[number] = Engine(ranks, self.rank, self._store, f"process set {number}")
        return number

    def remove_set(self, number: int) -> None:
        """Remove a process set, which all ranks must do."""
        del self.sets[number]
        engine = self._engines.pop(number, None)
        if engine is not None:
            engine.close(wait=True)

    def close(self, *, wait: bool) -> None:
        """End the threads of all process sets, see `Engine.close`."""
        atexit.unregister(self._at_exit)
        for _, engine in sorted(self._engines.items(), reverse=True):
            engine.close(wait=wait)

    def _at_exit(self) -> None:
        self.close(wait=False)


_current: Context | None = None


def begin() -> None:
    """Make the context of this process, if there is none."""
    global _current
    if _current is None:
        _current = Context()


def end() -> None:
    """End the context of this process, together with the other ranks."""
    global _current
    context, _current = _current, None
    if context is not None:
        context.close(wait=True)


def current() -> Context:
    """Return the context. Raises ValueError before `init`."""
    if _current is None:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return _current


def has_begun() -> bool:
    """Return whether there is a context."""
    return _current is not None
