"""Ranks of one host average arrays in memory that they share, and none waits for one that has ended."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tritium.errors import RanksDiffer
from tritium.frameworks.host_memory import HostMemory

Arrays = list[NDArray[Any]]


@dataclass(frozen=True)
class Peer:
    host: str
    address: str = "127.0.0.1"
    local_rank: int = 0
    device: str = "cpu"


@dataclass
class Gang:
    """Ranks as threads of this process, each with connections and a mapping of its own."""

    size: int
    hosts: Sequence[str] = ("one",)
    given: dict[int, Any] = field(default_factory=dict)
    replaced: dict[int, Any] = field(default_factory=dict)
    """What a rank gets in place of the first thing that ranks give each other, where rank 0 listens."""

    def __post_init__(self) -> None:
        self._barrier = threading.Barrier(self.size)

    def gather(self, rank: int, value: Any, first: bool) -> list[Any]:
        self.given[rank] = value
        self._barrier.wait(30)
        values = [self.given[each] for each in range(self.size)]
        self._barrier.wait(30)
        return [self.replaced[rank]] * self.size if first and rank in self.replaced else values

    def run(self, work: Callable[[int, HostMemory | None], Any]) -> list[Any]:
        """Return what work returns, or raises, on each rank; their memory is closed when it ends."""

        def on(rank: int) -> Any:
            memory = HostMemory.shared(Place(self, rank))
            try:
                return work(rank, memory)
            except (OSError, RanksDiffer) as error:
                return error
            finally:
                if memory is not None:
                    memory.close()

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(on, range(self.size), timeout=60))


class Place:
    local_rank, local_size, host, device, run_id, run_dir = 0, 1, "one", "cpu", "run", "."

    def __init__(self, gang: Gang, rank: int) -> None:
        self.rank, self.size, self._gang, self._first = rank, gang.size, gang, True
        self.peers = [Peer(gang.hosts[each % len(gang.hosts)]) for each in range(gang.size)]

    def gather(self, value: Any) -> list[Any]:
        first, self._first = self._first, False
        return self._gang.gather(self.rank, value, first)

    def barrier(self) -> None:
        self.gather(None)

    def note(self, text: str) -> None: ...


def arrays(rank: int, step: int, dtype: str) -> Arrays:
    """Arrays of several shapes, larger at each step, one of them empty, with other values on every rank."""
    draw = np.random.default_rng([rank, step])
    shapes = [(), (3 * step + 1, 5), (0, 4), (7,), (1000 * step,), (300, 300)]
    return [np.asarray(draw.normal(size=shape), dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_every_rank_gets_the_mean_bit_for_bit(size: int, dtype: str) -> None:
    def work(rank: int, memory: HostMemory | None) -> list[Arrays]:
        assert memory is not None
        steps = [arrays(rank, step, dtype) for step in (1, 30, 2, 2, 200)]
        for step in steps:
            memory.mean(step)
        return steps

    results = Gang(size).run(work)
    for number, step in enumerate((1, 30, 2, 2, 200)):
        every = [arrays(rank, step, dtype) for rank in range(size)]
        for at, mean in enumerate(results[0][number]):
            np.testing.assert_allclose(mean, np.mean([each[at] for each in every], axis=0), rtol=1e-5, atol=1e-6)
            for other in results[1:]:
                np.testing.assert_array_equal(mean, other[number][at])


@pytest.mark.parametrize("ended", [0, 1, 2])
def test_no_rank_waits_for_one_that_has_ended(ended: int) -> None:
    def work(rank: int, memory: HostMemory | None) -> None:
        assert memory is not None
        memory.mean(arrays(rank, 1, "float32"))
        if rank != ended:
            memory.mean(arrays(rank, 1, "float32"))

    for rank, error in enumerate(Gang(3).run(work)):
        if rank != ended:
            assert isinstance(error, ConnectionResetError)
            assert f"The connection of rank {rank} to another rank ended while they averaged gradients" in str(error)


@pytest.mark.parametrize("other", [0, 2])
def test_arrays_of_another_size_are_an_error_on_every_rank_and_stay_one(other: int) -> None:
    def work(rank: int, memory: HostMemory | None) -> list[str]:
        assert memory is not None
        messages = []
        for _ in range(2):
            with pytest.raises((RanksDiffer, OSError)) as caught:
                memory.mean([np.ones(9 if rank == other else 8, "float32")])
            messages.append(f"{caught.type.__name__}: {caught.value}")
        return messages

    for rank, (first, second) in enumerate(Gang(3).run(work)):
        size = 36 if rank == other else 32
        assert first.startswith(
            f"RanksDiffer: Ranks average gradients of different sizes: {size} bytes on rank {rank}."
        )
        assert "ConnectionResetError" in second


def test_ranks_share_none_on_two_hosts_or_where_one_does_not_find_rank_0() -> None:
    def work(rank: int, memory: HostMemory | None) -> bool:
        return memory is None

    assert Gang(2, hosts=("one", "two")).run(work) == [True, True]
    assert Gang(3, replaced={2: b"\0tritium-nobody"}).run(work) == [True, True, True]
    assert Gang(1).run(work) == [True]


def test_nothing_stays_open() -> None:
    def work(rank: int, memory: HostMemory | None) -> None:
        assert memory is not None
        memory.mean(arrays(rank, 3, "float32"))

    before = len(os.listdir("/proc/self/fd"))
    assert Gang(3).run(work) == [None] * 3
    assert Gang(3, replaced={1: b"\0tritium-nobody"}).run(lambda rank, memory: None) == [None] * 3
    assert len(os.listdir("/proc/self/fd")) == before
    gc.collect()  # what other tests have caught still holds what was mapped
    with open("/proc/self/maps") as maps:
        assert "tritium-means" not in maps.read()
