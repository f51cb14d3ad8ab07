"""A collective that a rank has asked for, and what must be equal in it on all ranks (rank)."""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tritium_compat.horovod.errors import HorovodInternalError

FREE_ROWS = ("allgather", "alltoall")
"""Collectives whose tensors may differ in their first dimension."""
_WITH_JOINED = ("allreduce", "barrier")


@dataclass(frozen=True)
class Signature:
    """What the other ranks must know of a request."""

    kind: str
    """"allreduce", "allgather", "broadcast", "alltoall", "reducescatter" or "barrier"."""
    name: str
    tensors: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """dtype and shape of each tensor; grouped collectives have several."""
    device: str = "cpu"
    detail: tuple[tuple[str, Any], ...] = ()
    """Arguments that must be equal, by their names."""

    @property
    def key(self) -> str:
        """What a request is found by on the other ranks. Requests of different kinds may have the same name."""
        return f"{self.kind}.{self.name}"

    @functools.lru_cache(4096)  # noqa: B019 - they are small, and alike in each step
    def digest(self, before: int) -> int:
        """Return 63 bits that stand for this request after those that `before` stands for."""
        text = f"{before}{self.kind}{self.name}{self._compared()}{self.device}{self.detail}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1

    def _compared(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        if self.kind not in FREE_ROWS:
            return self.tensors
        return tuple((dtype, (-1, *shape[1:])) for dtype, shape in self.tensors)

    def differs(self, other: Signature) -> bool:
        """Return whether ranks with these two can't do the collective."""
        mine, its = (self._compared(), self.device, self.detail), (other._compared(), other.device, other.detail)
        return mine != its

    def shown(self) -> str:
        """Return what is compared, for a message."""
        tensors = ", ".join(f"{dtype} of shape {shape}" for dtype, shape in self.tensors[:4])
        more = f" and {len(self.tensors) - 4} more" if len(self.tensors) > 4 else ""
        detail = "".join(f", {name}={value!r}" for name, value in self.detail)
        return f"{tensors}{more} on {self.device}{detail}"


@dataclass
class Request:
    """A collective that this rank has asked for."""

    signature: Signature
    tensors: Sequence[Any] = ()
    outputs: Sequence[Any] = ()
    splits: Any = None
    result: Any = None
    error: BaseException | None = None
    waits: bool = False
    """Whether a thread of the user's waits for the result."""
    done: threading.Event = field(default_factory=threading.Event)
    before: Any = None
    """A CUDA event after which the tensors are there."""
    after: Any = None
    """A CUDA event after which the result is there."""

    def end(self, result: Any = None, error: BaseException | None = None) -> None:
        """Give the result, or the reason why there is none."""
        self.result, self.error = result, error
        self.done.set()


@dataclass(frozen=True)
class Agreement:
    """What the ranks have found from the requests of all of them, the same on every rank."""

    ready: Sequence[Signature]
    """What all ranks that have not joined have asked for, in the order in which all do it."""
    wrong: Mapping[str, str]
    """Key of a request -> why it can't be done."""


def agree(asked: Mapping[int, Sequence[Signature]], joined: Sequence[int]) -> Agreement:
    """Return what can be done now.

    asked : rank -> its requests, of every rank that has not joined.
    joined : the ranks that have no more rows, and add zeros to what the others sum.
    """
    by_rank = {rank: {signature.key: signature for signature in given} for rank, given in asked.items()}
    first = next(iter(by_rank.values()), {})
    ready, wrong = [], {}
    for key, signature in first.items():
        if not all(key in others for others in by_rank.values()):
            continue
        if any(signature.differs(others[key]) for others in by_rank.values()):
            listed = "; ".join(f"rank {rank}: {others[key].shown()}" for rank, others in by_rank.items())
            wrong[key] = f"{signature.kind} {signature.name!r} differs between ranks: {listed}."
        elif joined and signature.kind not in _WITH_JOINED:
            wrong[key] = (
                f"{signature.kind} {signature.name!r} can't be done: rank {joined[0]} has called join(), and takes "
                "part in allreduce alone."
            )
        else:
            ready.append(signature)
    return Agreement(ready, wrong)


def never_meet(asked: Mapping[int, Sequence[Signature]], joined: Sequence[int]) -> HorovodInternalError:
    """Return the error of ranks that all wait, each for something that another one does not do."""
    shown = []
    for rank, given in sorted(asked.items()):
        names = ", ".join(f"{one.kind} {one.name!r}" for one in given[:3])
        shown.append(f"rank {rank} waits for {names}{f' and {len(given) - 3} more' if len(given) > 3 else ''}")
    shown += [f"rank {rank} has called join()" for rank in joined]
    return HorovodInternalError(
        f"The ranks wait for each other in different collectives: {'; '.join(shown)}. Call the same ones on every rank."
    )
