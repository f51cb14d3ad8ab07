"""DDP's sums over ranks, bit for bit the same in a training that continues as in one that was not interrupted."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tritium as tr
from tritium.frameworks.host_memory import HostMemory
from tritium.frameworks.torch_memory import host_memory
from tritium.gang.rank.world import world
from tritium.ml.torch.ddp import Gradients, replicate
from tritium.ml.torch.ranks import Ranks


class Net(nn.Module):
    """A net used in another order than defined, of several buckets (1 MB, then 25), with sparse gradients."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.last, self.wide, self.first = nn.Linear(700, 1), nn.Linear(300, 700), nn.Linear(8, 300)
        self.embedding = nn.Embedding(50, 8, sparse=sparse)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.normed = nn.BatchNorm1d(8)

    def forward(self, words: torch.Tensor) -> Any:
        x = self.normed(self.frozen(self.embedding(words)))
        return self.last(self.wide(self.first(x).tanh()).tanh())


def steps(ranks: Ranks, net: Any, gradients: Gradients, first: int, last: int, accumulated: int) -> list[bytes]:
    """Take some steps. Return their gradients, as bytes."""
    found = []
    for step in range(first, last):
        for part in range(accumulated):
            words = torch.randint(
                0, 50, (6,), generator=torch.Generator().manual_seed(100 * step + 10 * part + ranks.rank)
            )
            with gradients.exchanged(now=part == accumulated - 1):
                net(words).square().mean().backward()
        with torch.no_grad():
            grads = [p.grad.to_dense() for p in net.parameters() if p.grad is not None]
            found += [grad.numpy().tobytes() for grad in grads]
            for parameter in net.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad.to_dense()
        net.zero_grad()
    return found


def train(sparse: bool, accumulated: int, by_gloo: bool) -> tuple[list[str], bool, bool]:
    """Return what arrived first, and whether later steps are the same after a restart with the order, and without.

    by_gloo : whether sums go through Gloo, as between hosts, and not through memory that the ranks share.
    """
    if by_gloo:
        HostMemory.shared = lambda _: None  # type: ignore[method-assign, assignment]
    dist.init_process_group("gloo")
    me = world()
    ranks = Ranks(me.rank, me.size, torch.device("cpu"))
    torch.manual_seed(3)
    module = Net(sparse)
    net = host_memory(replicate(module, ranks, find_unused_parameters=False))
    whole = Gradients(net)
    steps(ranks, net, whole, 0, 2, accumulated)
    saved = copy.deepcopy(module.state_dict())
    later = steps(ranks, net, whole, 2, 4, accumulated)
    same = []
    for order in (whole.order, None):
        again = Net(sparse)
        net = host_memory(replicate(again, ranks, find_unused_parameters=False))
        gradients = Gradients(net)
        gradients.restore(order)
        assert all(p.grad is None for p in net.parameters())
        assert net.module is again
        again.load_state_dict(saved)
        same.append(steps(ranks, net, gradients, 2, 4, accumulated) == later)
    dist.destroy_process_group()
    assert whole.order is not None
    return whole.order, *same


@pytest.mark.processes
def test_the_buckets_of_a_new_start_are_those_of_the_later_steps() -> None:
    def both(by_gloo: bool) -> list[tuple[list[str], bool, bool]]:
        return [train(True, 1, by_gloo), train(False, 2, by_gloo)]

    there: dict[str, Any] = {"ranks": 3, "on": "driver", "framework": "torch", "progress": False}
    for _, dense in tr.launch(both, args=(False,), **there):
        assert dense[1:] == (True, True), "in memory the order makes no difference"
    for sparse, dense in tr.launch(both, args=(True,), **there):
        for order, with_it, without in (sparse, dense):
            assert order[0] in ("last.weight", "last.bias")
            assert order[-1] == "embedding.weight"
            assert sorted(order) == sorted(n for n, p in Net(False).named_parameters() if p.requires_grad)
            assert with_it
            assert not without, "the order makes no difference here, so this test shows nothing"


def test_alone_there_is_nothing_to_exchange_and_an_order_is_kept_for_later() -> None:
    net = nn.Linear(2, 1)
    gradients = Gradients(net)
    gradients.restore(["weight", "bias"])
    with gradients.exchanged(now=True):
        net(torch.ones(1, 2)).sum().backward()
    assert gradients.order == ["weight", "bias"]


def test_the_norms_are_those_of_all_gradients_whatever_their_layout_and_type() -> None:
    for sparse in (False, True):
        net = Net(sparse)
        gradients = Gradients(net)
        net(torch.tensor([3, 3, 7])).square().sum().backward()
        # Over 200,000 numbers at once a float32 norm is itself off by up to 1.2e-5.
        every = [p.grad.to_dense().double().norm() for p in net.parameters() if p.grad is not None]
        assert torch.allclose(torch.stack(gradients.norms()).double(), torch.stack(every), rtol=1e-5)
    half = nn.Linear(4, 1, bias=False).half()
    gradients = Gradients(half)
    half.weight.grad = torch.full_like(half.weight, 60_000.0)
    assert gradients.norms()[0].item() == 120_000.0, "more than a float16 holds, of gradients that it does hold"
