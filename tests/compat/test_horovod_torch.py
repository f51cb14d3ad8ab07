"""`horovod.torch` on PyTorch's own process groups, in ranks on the driver."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

import tritium as tr
from tritium.errors import RankFailed

pytestmark = [pytest.mark.timeout(300), pytest.mark.imports("torch")]
TWO: dict[str, Any] = {"ranks": 2, "on": "driver", "progress": False, "output": "none", "retries": 0}


def per_rank(function: Callable[[], Any], **settings: Any) -> list[Any]:
    """Return what the function gives in each rank."""

    def connected() -> Any:
        import tritium.compat.horovod.torch as hvd

        hvd.init()
        found = function()
        hvd.shutdown()
        return found

    result: list[Any] = tr.launch(connected, **TWO | settings)
    return result


def test_ranks_and_sizes_are_those_of_the_gang() -> None:
    def places() -> Any:
        import tritium.compat.horovod.torch as hvd

        own = [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()]
        hvd.shutdown()
        hvd.init()
        return own, hvd.is_initialized(), hvd.is_homogeneous(), hvd.mpi_built(), hvd.gloo_built()

    built = (True, True, False, True)
    assert per_rank(places) == [([0, 2, 0, 2, 0, 1], *built), ([1, 2, 1, 2, 0, 1], *built)]


def test_outside_a_gang_there_is_one_rank() -> None:
    def alone() -> Any:
        import torch

        import tritium.compat.horovod.torch as hvd

        x, model = torch.arange(4.0), torch.nn.Linear(1, 1)
        calls: list[Callable[[], Any]] = [
            *(hvd.rank, hvd.size, hvd.local_rank, hvd.barrier, hvd.join, lambda: hvd.add_process_set([0])),
            *(lambda: hvd.allreduce(x), lambda: hvd.allgather(x), lambda: hvd.broadcast(x, 0), lambda: hvd.alltoall(x)),
            *(lambda: hvd.broadcast_parameters(model.state_dict()), lambda: hvd.allgather_object(1)),
            lambda: hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0)),
        ]
        before = set()
        for call in calls:
            try:
                before.add(str(call()))
            except ValueError as error:
                before.add(str(error))
        hvd.init()
        found = [hvd.allreduce(x), hvd.allgather(x), hvd.broadcast(x, 0), hvd.alltoall(x), hvd.reducescatter(x)]
        size = hvd.size()
        hvd.shutdown()
        return before, size, [one.tolist() for one in found], hvd.is_initialized()

    ((before, size, found, after),) = tr.launch(alone, **TWO | {"ranks": 1})
    assert before == {"Horovod has not been initialized; use hvd.init()."}
    assert (size, found, after) == (1, [[0.0, 1.0, 2.0, 3.0]] * 5, False)


def test_collectives_named_in_another_order_find_each_other() -> None:
    def crossing() -> Any:
        import torch

        import tritium.compat.horovod.torch as hvd

        names = ["a", "b", "c"] if hvd.rank() == 0 else ["c", "a", "b"]
        given = {name: torch.full((3,), float("abc".index(name) + 10 * hvd.rank())) for name in names}
        handles = {name: hvd.allreduce_async(given[name], name=name, op=hvd.Sum) for name in names}
        return {name: hvd.synchronize(handles[name]).tolist() for name in sorted(names)}

    assert per_rank(crossing) == [{"a": [10.0] * 3, "b": [12.0] * 3, "c": [14.0] * 3}] * 2


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("hvd.allreduce(torch.zeros(3 + r), name='x')", "'x' differs between ranks: rank 0: float32 of shape (3,)"),
        (
            "hvd.allreduce(torch.zeros(2, dtype=torch.int32 if r else torch.int64), name='x')",
            "rank 0: int64 of shape (2,) on cpu",
        ),
        ("hvd.allgather(torch.zeros(2 + r, 3 + r), name='x')", "rank 1: float32 of shape (3, 4) on cpu"),
        ("hvd.broadcast(torch.zeros(2), r, name='x')", "rank 1: float32 of shape (2,) on cpu, root_rank=1"),
        ("hvd.allreduce(torch.zeros(2), name='x', op=(hvd.Sum, hvd.Min)[r])", "op='min'"),
        (
            "hvd.allreduce(torch.zeros(2), name='ab'[r])",
            "The ranks wait for each other in different collectives: rank 0 waits for allreduce 'a'; rank 1 waits for "
            "allreduce 'b'. Call the same ones on every rank.",
        ),
    ],
    ids=["shape", "dtype", "columns", "root", "op", "order"],
)
def test_what_differs_between_ranks_is_named_on_all_of_them(call: str, says: str) -> None:
    def wrong() -> Any:
        import torch

        import tritium.compat.horovod.torch as hvd

        found = []
        for _ in range(2):  # the ranks are still connected
            try:
                exec(call, {"hvd": hvd, "torch": torch, "r": hvd.rank()})
            except hvd.HorovodInternalError as error:
                found.append(str(error))
        return found, hvd.allreduce(torch.ones(1), op=hvd.Sum).item()

    for texts, total in per_rank(wrong):
        assert len(texts) == 2
        assert all(says in text for text in texts), texts
        assert total == 2


def test_a_rank_that_shuts_down_or_dies_is_told_to_the_others() -> None:
    def leaves() -> Any:
        import torch

        import tritium.compat.horovod.torch as hvd

        hvd.init()
        if hvd.rank() == 1:
            hvd.shutdown()
            return None
        try:
            hvd.allreduce(torch.ones(1))
        except hvd.HorovodInternalError as error:
            return str(error)
        return None

    assert tr.launch(leaves, **TWO) == ["Horovod has been shut down by rank 1.", None]

    def dies() -> None:
        import torch

        import tritium.compat.horovod.torch as hvd

        hvd.init()
        if hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        hvd.allreduce(torch.ones(1))

    with pytest.raises(RankFailed, match="SIGKILL") as caught:
        tr.launch(dies, **TWO)
    assert caught.value.rank == 1


def test_ranks_without_rows_join() -> None:
    def uneven() -> Any:
        import torch

        import tritium.compat.horovod.torch as hvd

        sums = [hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() for _ in range(2 + 3 * hvd.rank())]
        return sums, hvd.join(), hvd.allreduce(torch.ones(1), op=hvd.Sum).item()

    short, long = per_rank(uneven)
    assert short == ([[2.0, 2.0]] * 2, 1, 2.0)
    assert long == ([[2.0, 2.0]] * 2 + [[1.0, 1.0]] * 3, 1, 2.0)


def test_what_each_step_does_is_done_at_once_until_a_rank_does_something_else() -> None:
    def steps() -> Any:
        import random

        import torch

        import tritium.compat.horovod.torch as hvd
        from tritium.compat.horovod.collectives import Collectives

        unasked, end_fused = [0], Collectives.end_fused

        def counted(*args: Any) -> None:
            unasked[0] += 1
            end_fused(*args)

        setattr(Collectives, "end_fused", counted)  # noqa: B010
        both, own, rank = random.Random(3), random.Random(hvd.rank()), hvd.rank()

        def step(number: int, names: list[str], ranks: int = 2) -> list[bool]:
            one_by_one = both.random() < 0.9
            if not one_by_one:
                own.shuffle(names)
            given = {name: torch.full((3, 2), float(number + len(name) * rank)) for name in names}
            handles = {}
            for name, value in given.items():
                handles[name] = hvd.allreduce_async(value, name=name, op=hvd.Sum)
                if one_by_one:
                    hvd.synchronize(handles[name])
            if own.random() < 0.2:
                hvd.poll(handles[names[0]])
            sums = {name: float(2 * number + len(name)) if ranks == 2 else float(number + len(name)) for name in names}
            return [bool((hvd.synchronize(handle) == sums[name]).all()) for name, handle in handles.items()]

        right: list[bool] = []
        for number in range(80):
            more = ["loss"] if both.random() < 0.1 else ["hi", "x"] if both.random() < 0.1 else []
            right += step(number, ["a", "bc", "def", *more])
            if number % 30 == 29:
                right += [hvd.broadcast(torch.tensor([rank + 1]), 1, name="a").item() == 2]
                try:
                    hvd.allreduce(torch.ones(2 + rank), name="a")
                except hvd.HorovodInternalError as error:
                    right += ["differs between ranks" in str(error)]
        for number in range(12) if rank else ():
            right += step(number, ["a", "bc", "def"], ranks=1)
        return len(right), all(right), unasked[0], hvd.join()

    (first, *others), (second, *same) = per_rank(steps)
    assert others == same
    assert (others[0], others[2], second - first) == (True, 1, 36)
    assert 20 < others[1] < 220, "steps were done without asking"


def test_process_sets_reduce_among_themselves() -> None:
    def by_set() -> Any:
        import torch

        import tritium.compat.horovod.torch as hvd

        pair, one = hvd.add_process_set([0, 2]), hvd.add_process_set([1])
        mine = pair if pair.included() else one
        total = hvd.allreduce(torch.tensor([float(hvd.rank())]), op=hvd.Sum, process_set=mine).item()
        try:
            hvd.allreduce(torch.ones(1), process_set=one if mine is pair else pair)
        except ValueError as error:
            refused = str(error)
        place = mine.rank(), mine.size(), mine.ranks
        removed = hvd.remove_process_set(pair), hvd.remove_process_set(pair)
        return total, place, refused, removed

    found = per_rank(by_set, ranks=3)
    assert [total for total, *_ in found] == [2.0, 1.0, 2.0]
    assert [place for _, place, *_ in found] == [(0, 2, [0, 2]), (0, 1, [1]), (1, 2, [0, 2])]
    assert "Rank 1 is not in process set 1, which has the ranks [0, 2]." in found[1][2]
    assert {removed for *_, removed in found} == {(True, False)}


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two passes": {"backward_passes_per_step": 2},
    "predivide": {"gradient_predivide_factor": 2.0},
    "groups": {"groups": 2},
    "fp16": {"compression": "fp16"},
    "sum": {"op": "sum"},
}


def test_two_ranks_learn_what_one_learns() -> None:
    def trained(options: dict[str, Any]) -> Any:
        import torch

        import tritium.compat.horovod.torch as hvd

        torch.manual_seed(hvd.rank())
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + hvd.rank()), momentum=0.9)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        given = dict(options)
        if "compression" in given:
            given["compression"] = hvd.Compression.fp16
        passes = given.get("backward_passes_per_step", 1)
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **given)
        draw = torch.Generator().manual_seed(1)
        for step in torch.randn(5, passes, 8, 4, generator=draw):
            optimizer.zero_grad()
            for part in step:
                own = part[hvd.rank() :: hvd.size()]
                torch.nn.functional.mse_loss(model(own), own.sum(1, keepdim=True)).backward()
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(), type(optimizer).__name__

    def all_trained() -> Any:
        return {name: trained(options) for name, options in OPTIONS.items()}

    (one,) = per_rank(all_trained, ranks=1)
    first, second = per_rank(all_trained)
    assert first == second
    for name in OPTIONS:
        (weights, kind), (expected, _) = first[name], one[name]
        assert kind == "SGD"
        if name == "sum":
            assert weights != pytest.approx(expected, rel=1e-3), "twice the gradient"
        else:
            assert weights == pytest.approx(expected, rel=1e-5, abs=1e-3 if name == "fp16" else 1e-6), name


def test_batch_norm_of_two_ranks_is_that_of_all_rows() -> None:
    def normalized() -> Any:
        import torch

        import tritium.compat.horovod.torch as hvd

        torch.manual_seed(0)
        x = torch.randn(12, 3, 5)
        own = (x[:8] if hvd.rank() == 0 else x[8:]).clone().requires_grad_()
        norm, plain, whole = hvd.SyncBatchNorm(3), torch.nn.BatchNorm1d(3), x.clone().requires_grad_()
        out, expected = norm(own), plain(whole)
        (out**3).sum().backward()
        (expected**3).sum().backward()
        rows = slice(0, 8) if hvd.rank() == 0 else slice(8, 12)
        return [
            torch.allclose(out, expected[rows], atol=1e-5),
            torch.allclose(own.grad, whole.grad[rows], atol=1e-4),
            torch.allclose(norm.running_mean, plain.running_mean, atol=1e-6),
            torch.allclose(norm.running_var, plain.running_var, atol=1e-6),
        ]

    assert per_rank(normalized) == [[True] * 4] * 2
