"""Gradients of ranks on one host go through memory that they share, and are those that a process group gives."""

from __future__ import annotations

import inspect
import json
import pickle
import resource
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import tritium as tr
from tritium.errors import RankFailed
from tritium.frameworks.host_memory import HostMemory
from tritium.ml import Callback, TrainState, fit
from tritium.torch import host_memory

ALONE: dict[str, Any] = {"on": "driver", "progress": False, "output": "none"}
TORCH: dict[str, Any] = {**ALONE, "framework": "torch"}
TABLE = pa.table({"x": np.arange(48, dtype=np.float32) / 48, "y": np.arange(48, dtype=np.float32) % 5})
SETTINGS: dict[str, Any] = {
    "model": lambda: nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)),
    "loss": nn.MSELoss(),
    "optimizer": lambda p: torch.optim.SGD(p, 0.05, momentum=0.5),
    "feature_cols": ["x"],
    "label_cols": ["y"],
    "batch_size": 4,
    "epochs": 2,
    "ranks": 2,
    "verbose": False,
}


class Net(nn.Module):
    """Layers of several buckets (DDP's first has 1 MB), and an embedding whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 700, sparse=True)
        self.hidden, self.last = nn.Linear(700, 700), nn.Linear(700, 1)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.last(self.hidden(self.embedding(words)).tanh())


def counted() -> list[int]:
    """Count the bytes that this rank averages in memory from now on."""
    bytes_ = [0]
    mean = HostMemory.mean

    def count(memory: HostMemory, arrays: Any) -> None:
        bytes_[0] += sum(array.nbytes for array in arrays)
        mean(memory, arrays)

    HostMemory.mean = count  # type: ignore[method-assign]
    return bytes_


def gradients_of_a_step(dtype: torch.dtype) -> tuple[int, list[tuple[str, bytes, bytes]], list[tuple[str, float]]]:
    """Return the bytes averaged in memory, and the gradients: bits and what they should be, or how far off they are."""
    averaged, exact, about = counted(), [], []
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    module, alone = Net().to(dtype), Net().to(dtype)
    words = torch.arange(6) + rank
    net = host_memory(DistributedDataParallel(module))
    for step in range(3):  # DDP arranges its buckets after the first
        alone.load_state_dict(module.state_dict())
        alone.zero_grad()
        alone(words).square().mean().backward()
        net(words).square().mean().backward()
        for (name, got), own in zip(module.named_parameters(), alone.parameters(), strict=True):
            each = [grad.to_dense().float() for grad in tr.world().gather(own.grad)]
            found, wanted = got.grad.to_dense().float(), sum(each[1:], each[0]) / size
            if name == "embedding.weight" or dtype not in (torch.float32, torch.float64):
                about.append((f"{step} {name}", float((found - wanted).abs().max() / wanted.abs().max())))
            else:
                exact.append((f"{step} {name}", found.numpy().tobytes(), wanted.numpy().tobytes()))
        with torch.no_grad():
            for parameter in module.parameters():
                parameter -= 0.1 * parameter.grad.to_dense()
        module.zero_grad()
    dist.destroy_process_group()
    return averaged[0], exact, about


def test_the_mean_of_three_ranks_is_exact_and_what_memory_can_not_average_goes_through_the_group() -> None:
    dense = 4 * (700 * 700 + 700 + 700 + 1)
    for averaged, exact, about in tr.launch(gradients_of_a_step, ranks=3, args=(torch.float32,), **TORCH):
        assert averaged == 3 * dense
        assert len(exact) == 12
        assert [name for name, found, wanted in exact if found != wanted] == []
        assert len(about) == 3
        assert max(error for _, error in about) < 1e-6


def test_gradients_in_bfloat16_go_through_the_group() -> None:
    for averaged, exact, about in tr.launch(gradients_of_a_step, ranks=2, args=(torch.bfloat16,), **TORCH):
        assert (averaged, exact) == (0, [])
        assert len(about) == 15
        assert max(error for _, error in about) < 0.02


def test_a_training_learns_the_same_bits_as_with_the_group() -> None:
    memory = fit(TABLE, **SETTINGS | ALONE)
    group = fit(TABLE, **SETTINGS | ALONE, ddp_options={"comm_hook": allreduce_hook})
    for one, other in zip(memory.module.state_dict().values(), group.module.state_dict().values(), strict=True):
        assert one.numpy().tobytes() == other.numpy().tobytes()
    assert [entry["loss"] for entry in memory.history] == [entry["loss"] for entry in group.history]


class Raises(Callback):
    def on_step_end(self, state: TrainState) -> None:
        if state.step == 5 and state.rank == 1:
            raise LookupError("rank 1's own")


def test_an_error_of_a_rank_is_told_and_not_that_the_others_missed_it() -> None:
    with pytest.raises(RankFailed, match=r"Rank 1 .* raised LookupError: .?rank 1's own") as caught:
        fit(TABLE, **SETTINGS | ALONE, callbacks=[Raises()])
    assert caught.value.rank == 1
    assert "averaged gradients" not in str(caught.value)


def joined(divide_by_all: bool, memory: bool) -> list[float]:
    """Return a weight after each step of a training in which rank 1 takes two steps and rank 0 four."""
    dist.init_process_group("gloo")
    averaged = counted()
    net = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    if memory:
        host_memory(net)
    with torch.no_grad():
        net.module.weight.fill_(1.0)
    optimizer, weights = torch.optim.SGD(net.parameters(), 0.01), []
    for _ in range(2):
        net(torch.tensor([[2.0 + dist.get_rank()]])).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        weights.append(net.module.weight.item())
    before = averaged[0]
    assert (before > 0) == memory
    with net.join(divide_by_initial_world_size=divide_by_all):
        for _ in range(4 - 2 * dist.get_rank()):
            net(torch.tensor([[2.0 + dist.get_rank()]])).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            weights.append(net.module.weight.item())
    assert averaged[0] == before
    dist.destroy_process_group()
    return weights


def test_ranks_that_join_one_after_the_other_average_as_they_do_without_memory() -> None:
    def both() -> list[list[float]]:
        return [joined(divide_by_all, memory) for divide_by_all in (True, False) for memory in (True, False)]

    for all_memory, all_group, rest_memory, rest_group in tr.launch(both, ranks=2, **TORCH):
        assert all_memory == pytest.approx(all_group)
        assert rest_memory == pytest.approx(rest_group)


def test_a_module_has_one_hook_and_goes_through_the_group_without_the_line() -> None:
    def train() -> tuple[int, int]:
        dist.init_process_group("gloo")
        averaged = counted()
        plain = DistributedDataParallel(nn.Linear(2, 1))
        plain(torch.ones(1, 2)).sum().backward()
        before = averaged[0]
        plain.register_comm_hook(None, allreduce_hook)
        shared = host_memory(DistributedDataParallel(nn.Linear(2, 1)))
        pickle.dumps(shared)  # as torch.save does
        shared(torch.ones(1, 2)).sum().backward()
        for net, register in ((plain, host_memory), (shared, lambda net: net.register_comm_hook(None, allreduce_hook))):
            with pytest.raises(RuntimeError, match="can only be called once"):
                register(net)
        dist.destroy_process_group()
        return before, averaged[0]

    assert tr.launch(train, ranks=2, **TORCH) == [(0, 12)] * 2


def test_without_the_framework_it_changes_nothing() -> None:
    def train() -> bool:
        dist.init_process_group("gloo")
        net = DistributedDataParallel(nn.Linear(2, 1))
        same = host_memory(net) is net
        net.register_comm_hook(None, allreduce_hook)
        dist.destroy_process_group()
        return same

    assert tr.launch(train, ranks=2, **ALONE) == [True, True]


def test_no_class_of_torch_is_patched_in_a_rank() -> None:
    def patched() -> list[str]:
        import torch.distributed.fsdp  # noqa: F401 - and all that it imports

        dist.init_process_group("gloo")
        host_memory(DistributedDataParallel(nn.Linear(2, 1)))
        classes = {
            value
            for name, module in list(sys.modules.items())
            if name.partition(".")[0] == "torch"
            for value in vars(module).values()
            if isinstance(value, type) and value.__module__.partition(".")[0] == "torch"
        }
        functions = [(kind, name, value) for kind in classes for name, value in vars(kind).items()]
        assert len(functions) > 10_000
        dist.destroy_process_group()
        return [
            f"{kind.__qualname__}.{name}"
            for kind, name, value in functions
            if inspect.isfunction(value) and is_ours(inspect.unwrap(value, stop=is_ours))
        ]

    def is_ours(value: Any) -> bool:
        return "tritium" in str(getattr(getattr(value, "__code__", None), "co_filename", ""))

    assert tr.launch(patched, ranks=2, **TORCH) == [[], []]


def test_ranks_go_on_without_memory_where_rank_0_may_not_make_it() -> None:
    """As with `ulimit -f`, which also goes for files in memory."""

    def train() -> tuple[int, float]:
        if tr.world().rank == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, resource.RLIM_INFINITY))
        dist.init_process_group("gloo")
        averaged, net = counted(), host_memory(DistributedDataParallel(nn.Linear(1, 1)))
        net(torch.ones(1, 1) + dist.get_rank()).sum().backward()
        dist.destroy_process_group()
        return averaged[0], net.module.weight.grad.item()

    assert tr.launch(train, ranks=2, **TORCH) == [(0, 1.5)] * 2


def test_ranks_of_a_group_of_their_own_do_not_share() -> None:
    def train() -> int:
        dist.init_process_group("gloo")
        averaged = counted()
        groups = [dist.new_group([0, 1]), dist.new_group([2])]
        net = host_memory(DistributedDataParallel(nn.Linear(2, 1), process_group=groups[dist.get_rank() // 2]))
        net(torch.ones(1, 2)).sum().backward()
        dist.destroy_process_group()
        return averaged[0]

    assert tr.launch(train, ranks=3, **TORCH) == [0, 0, 0]


def test_a_rank_that_returns_ends_the_step_of_the_others() -> None:
    def train() -> None:
        dist.init_process_group("gloo")
        net = host_memory(DistributedDataParallel(nn.Linear(2, 1)))
        for _ in range(3 - dist.get_rank()):
            net(torch.ones(1, 2)).sum().backward()

    with pytest.raises(RankFailed, match="another rank ended while they averaged gradients"):
        tr.launch(train, ranks=2, **TORCH)


def test_the_trace_has_the_wait_for_a_slower_rank(tmp_path: Path) -> None:
    fit(TABLE, **SETTINGS | ALONE, callbacks=[Slow()], trace=True, run_dir=str(tmp_path))
    ranks = json.loads((tmp_path / "report.json").read_text())["ranks"]
    assert ranks[0]["trace"]["seconds"]["communicate"] > 0.5 * 12 * 0.05
    assert ranks[1]["trace"]["seconds"]["other"] > 12 * 0.05


class Slow(Callback):
    def on_step_end(self, state: TrainState) -> None:
        if state.rank == 1:
            threading.Event().wait(0.05)
