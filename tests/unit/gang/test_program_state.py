"""What a program has set for its process or its thread changes nothing of what its ranks do."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

import tritium as tr
from program_state import OF_TORCH, STATES, State, all_of, each, launched, use_all
from tritium.errors import RankFailed

pytestmark = pytest.mark.processes
kept: Any = None


def left_on(state: State, use: Callable[[int], Any]) -> Any:
    """Return what `use` gives under a state that is never undone."""
    global kept
    kept = state()
    kept.__enter__()
    return use(0)


def test_in_a_rank(tmp_path: Path) -> None:
    for found in launched(each, STATES, use_all, run_dir=tmp_path / "run"):
        assert {name: result for name, result in found.items() if result != found[""]} == {}
        assert found[""][0] == [0, 1]


def test_in_a_rank_that_leaves_all_of_it_set(tmp_path: Path) -> None:
    plain = launched(use_all, 0, run_dir=tmp_path / "plain")
    assert launched(left_on, lambda: all_of(STATES, "little_recursion"), use_all, run_dir=tmp_path / "run") == plain


@pytest.mark.parametrize("spawned", [False, True])
def test_where_launch_is_called(tmp_path: Path, spawned: bool) -> None:
    plain = launched(use_all, 0, run_dir=tmp_path / "plain")
    with few_descriptors() if spawned else nullcontext(), all_of(STATES):
        found = launched(use_all, 0, run_dir=tmp_path / "run")
    assert found == plain


@contextmanager
def few_descriptors() -> Iterator[None]:
    """Leave this process so few descriptors that its ranks are not forked."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (900, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def too_deep(depth: int) -> int:
    return too_deep(depth + 1) + 1


def fail(_: int) -> None:
    world = tr.world()
    world.barrier()
    if world.rank == 1:
        too_deep(0)
    world.barrier()


@pytest.mark.parametrize("name", ["little_recursion", "no_working_directory", "blocked_signals", "no_output"])
def test_an_error_of_a_rank_is_told(name: str, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=r"Rank 1 .* raised RecursionError") as caught:
        launched(left_on, STATES[name], fail, run_dir=tmp_path / "rank")
    assert "return too_deep(depth + 1) + 1" in str(caught.value)


def test_an_error_of_a_rank_is_told_where_launch_is_called(tmp_path: Path) -> None:
    with all_of(STATES), pytest.raises(RankFailed, match=r"Rank 1 .* raised RecursionError"):
        launched(fail, 0, run_dir=tmp_path / "run")


def gradient() -> list[Any]:
    """Do as `use_all`, and average a gradient in memory."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    found = use_all(0)
    dist.init_process_group("gloo")
    module = nn.Linear(1, 1, bias=False)
    net = DistributedDataParallel(module)
    for _ in range(3):
        module.zero_grad()
        net(torch.tensor([[1.0 + tr.world().rank]])).sum().backward()
    dist.destroy_process_group()
    return [sum(found[1]), module.weight.grad.tolist(), str(module.weight.dtype)]


def test_where_launch_is_called_with_torch(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    # MKL does not find torch's library in a process that began without a directory: in plain Python, too.
    with all_of(STATES, "no_working_directory"), all_of(OF_TORCH):
        found = launched(gradient, run_dir=tmp_path / "run", framework="torch")
    assert found == [[total, [[1.5]], "torch.float32"] for total in (112.0, 128.0)]
