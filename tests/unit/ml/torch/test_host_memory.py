"""Gradients of ranks on one host go through memory that they share, and are those that a process group gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn

import tritium as tr
from tritium.errors import RankFailed
from tritium.gang.rank.world import world
from tritium.ml import Callback, TrainState, fit
from tritium.ml.torch.ddp import Replica, joined

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


def gradients_of_a_step(dtype: torch.dtype) -> tuple[int, list[tuple[str, bytes, bytes]], list[tuple[str, float]]]:
    """Return the bytes averaged in memory, and the gradients: bits and what they should be, or how far off they are."""
    averaged, exact, about = [0], [], []
    with joined(world()) as ranks:
        assert ranks.memory is not None
        mean = ranks.memory.mean

        def counted(arrays: Any) -> None:
            averaged[0] += sum(array.nbytes for array in arrays)
            mean(arrays)

        ranks.memory.mean = counted  # type: ignore[method-assign]
        torch.manual_seed(3)
        module, alone = Net().to(dtype), Net().to(dtype)
        words = torch.arange(6) + ranks.rank
        replica = Replica(module, ranks, find_unused_parameters=False)
        for step in range(3):  # DDP arranges its buckets after the first
            alone.load_state_dict(module.state_dict())
            alone.zero_grad()
            alone(words).square().mean().backward()
            with replica.gradients.exchanged(now=True):
                replica.net(words).square().mean().backward()
            for (name, got), own in zip(module.named_parameters(), alone.parameters(), strict=True):
                each = [grad.to_dense().float() for grad in ranks.gather(own.grad)]
                found, wanted = got.grad.to_dense().float(), sum(each[1:], each[0]) / ranks.size
                if name == "embedding.weight" or dtype not in (torch.float32, torch.float64):
                    about.append((f"{step} {name}", float((found - wanted).abs().max() / wanted.abs().max())))
                else:
                    exact.append((f"{step} {name}", found.numpy().tobytes(), wanted.numpy().tobytes()))
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter -= 0.1 * parameter.grad.to_dense()
            module.zero_grad()
    return averaged[0], exact, about


@pytest.mark.processes
def test_the_mean_of_three_ranks_is_exact_and_what_memory_can_not_average_goes_through_the_group() -> None:
    dense = 4 * (700 * 700 + 700 + 700 + 1)
    for averaged, exact, about in tr.launch(gradients_of_a_step, ranks=3, args=(torch.float32,), **TORCH):
        assert averaged == 3 * dense
        assert len(exact) == 12
        assert [name for name, found, wanted in exact if found != wanted] == []
        assert len(about) == 3
        assert max(error for _, error in about) < 1e-6


@pytest.mark.processes
def test_gradients_in_bfloat16_go_through_the_group() -> None:
    for averaged, exact, about in tr.launch(gradients_of_a_step, ranks=2, args=(torch.bfloat16,), **TORCH):
        assert (averaged, exact) == (0, [])
        assert len(about) == 15
        assert max(error for _, error in about) < 0.02


def through_the_group(_: Any, bucket: Any) -> Any:
    import torch.distributed as dist

    work = dist.all_reduce(bucket.buffer().div_(2), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


@pytest.mark.processes
def test_a_training_learns_the_same_bits_as_with_the_group() -> None:
    memory = fit(TABLE, **SETTINGS | ALONE)
    group = fit(TABLE, **SETTINGS | ALONE, ddp_options={"comm_hook": through_the_group})
    for one, other in zip(memory.module.state_dict().values(), group.module.state_dict().values(), strict=True):
        assert one.numpy().tobytes() == other.numpy().tobytes()
    assert [entry["loss"] for entry in memory.history] == [entry["loss"] for entry in group.history]


class Raises(Callback):
    def on_step_end(self, state: TrainState) -> None:
        if state.step == 5 and state.rank == 1:
            raise LookupError("rank 1's own")


@pytest.mark.processes
def test_an_error_of_a_rank_is_told_and_not_that_the_others_missed_it() -> None:
    with pytest.raises(RankFailed, match=r"Rank 1 .* raised LookupError: .?rank 1's own") as caught:
        fit(TABLE, **SETTINGS | ALONE, callbacks=[Raises()])
    assert caught.value.rank == 1
    assert "averaged gradients" not in str(caught.value)
