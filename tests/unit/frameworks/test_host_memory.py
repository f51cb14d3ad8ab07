"""Ranks of one host average arrays in memory that they share, and none waits for one that has ended."""

from __future__ import annotations

import gc
import json
import os
import resource
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import tritium as tr
from program_state import TIMEOUT, default_timeout
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
    """What a rank gets in place of the first thing that ranks give each other: where rank 0 listens."""

    def __post_init__(self) -> None:
        self._barrier = threading.Barrier(self.size)

    def gather(self, rank: int, value: Any, first: bool) -> list[Any]:
        self.given[rank] = value
        self._barrier.wait(30)
        values = [self.given[each] for each in range(self.size)]
        self._barrier.wait(30)
        return [(None, self.replaced[rank])] * self.size if first and rank in self.replaced else values

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


def test_a_default_timeout_of_the_program_does_not_end_the_wait_for_a_slower_rank() -> None:
    def work(rank: int, memory: HostMemory | None) -> None:
        assert memory is not None
        for late in range(2):
            if rank == late:
                threading.Event().wait(2 * TIMEOUT)
            memory.mean(arrays(rank, 1, "float32"))

    with default_timeout():
        assert Gang(2).run(work) == [None] * 2


@contextmanager
def descriptors(number: int) -> Iterator[None]:
    """Leave this process so many file descriptors that it can still open."""
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.dup(0) for _ in range(number + 1)]
    for each in held:
        os.close(each)
    resource.setrlimit(resource.RLIMIT_NOFILE, (held[-1], hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))


@contextmanager
def limited(kind: int, limit: int) -> Iterator[None]:
    before, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (before, hard))


REFUSED: list[tuple[int, str, Callable[[], AbstractContextManager[None]]]] = [
    (0, "File too large", lambda: limited(resource.RLIMIT_FSIZE, 1 << 20)),
    *((0, "Too many open files", lambda number=number: descriptors(number)) for number in range(3)),
    (1, "Too many open files", lambda: descriptors(0)),
    (1, "it got no descriptor of the memory from rank 0", lambda: descriptors(1)),
]


@pytest.mark.processes
def test_where_a_rank_can_not_open_the_memory_no_rank_has_it_and_that_is_said(tmp_path: Path) -> None:
    def work() -> list[tuple[bool, int]]:
        world, found = tr.world(), []
        for rank, _, refused in (*REFUSED, (0, "", nullcontext)):
            before = len(os.listdir("/proc/self/fd"))
            with refused() if rank == world.rank else nullcontext():
                memory = HostMemory.shared(world)
            values = np.full(3, world.rank, np.float32)
            if memory is not None:
                memory.mean([values])
                memory.close()
            found.append((memory is not None, len(os.listdir("/proc/self/fd")) - before))
            assert values.tolist() == [1.0 if memory else world.rank] * 3
        return found

    results = tr.launch(work, ranks=3, on="driver", progress=False, output="none", run_dir=str(tmp_path / "run"))
    assert results == [[*[(False, 0)] * len(REFUSED), (True, 0)]] * 3
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    notes = [event["text"] for event in events if event["kind"] == "note"]
    assert len(notes) == len(REFUSED)
    for note, (rank, reason, _) in zip(notes, REFUSED, strict=True):
        assert note.startswith("ranks average gradients over TCP")
        assert f"rank {rank} on " in note
        assert reason in note


@pytest.mark.processes
@pytest.mark.parametrize("full", [0, 1])
def test_a_rank_that_can_not_map_the_memory_says_so_and_no_other_waits_for_it(full: int) -> None:
    def work() -> str:
        world = tr.world()
        memory, values = HostMemory.shared(world), np.ones(1 << 24, np.float32)
        assert memory is not None
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        with limited(resource.RLIMIT_AS, used + (1 << 26)) if world.rank == full else nullcontext():
            with pytest.raises((MemoryError, OSError)) as caught:
                memory.mean([values])
            return str(caught.value)

    results = tr.launch(work, ranks=2, on="driver", progress=False, output="none")
    assert f"Rank {full} can't map 134,217,728 bytes of memory" in results.pop(full)
    assert "to another rank ended while they averaged gradients" in results[0]
