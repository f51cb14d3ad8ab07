"""The comparison of ranks' collectives: who waits, who has not called, and what torch's recorder says of a rank."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from tritium.frameworks.collectives import counts, of_recorder
from tritium.frameworks.host_memory import HostMemory
from tritium.gang.coordinator.collective_calls import CollectiveCalls, awaited
from tritium.gang.coordinator.stalls import Answer, RankStatus, describe_stall


def calls(
    called: int, waits: int | None = None, name: str = "all_reduce of Float [4]", **facts: Any
) -> CollectiveCalls:
    return CollectiveCalls(**{"group": "gloo 0", "ranks": [0, 1, 2], **facts}, called=called, waits=waits, name=name)


def lines(*by_rank: list[CollectiveCalls] | None) -> list[str]:
    return [one.line() for one in awaited(dict(enumerate(by_rank)))]


class TestAwaited:
    def test_a_rank_that_has_not_called(self) -> None:
        assert lines([calls(6, 6)], [calls(5)], [calls(6, 6)]) == [
            "Collective number 6: ranks 0, 2 wait in all_reduce of Float [4]; rank 1 has not called it "
            "(last call: number 5)."
        ]
        assert lines([calls(1, 1)], [], []) == [
            "Collective number 1: rank 0 waits in all_reduce of Float [4]; ranks 1, 2 have not called it "
            "(no call known)."
        ]

    def test_no_rank_waits(self) -> None:
        assert lines([calls(6)], [calls(5)], [calls(6)]) == []
        assert lines([], None, []) == []

    def test_all_have_called(self) -> None:
        assert lines([calls(6, 6)], [calls(6, 6)], [calls(6, 6)]) == [
            "Collective number 6: ranks 0, 1, 2 wait in all_reduce of Float [4]."
        ]

    def test_the_first_one_that_has_not_ended_counts(self) -> None:
        """With NCCL a rank calls further ones meanwhile."""
        assert lines([calls(9, 6)], [calls(4)], [calls(7, 7)]) == [
            "Collective number 6: rank 0 waits in all_reduce of Float [4]; rank 1 has not called it "
            "(last call: number 4); it has ended on rank 2."
        ]

    def test_ranks_that_have_called_different_ones(self) -> None:
        assert lines([calls(6, 6)], [calls(6, 6, "barrier")], [calls(6, 6)]) == [
            "Collective number 6: ranks 0, 2 wait in all_reduce of Float [4]; rank 1 waits in barrier."
        ]

    def test_a_rank_that_does_not_answer_is_not_said_to_be_missing(self) -> None:
        assert lines([calls(6, 6)], None, [calls(5)]) == [
            "Collective number 6: rank 0 waits in all_reduce of Float [4]; rank 2 has not called it "
            "(last call: number 5); rank 1 does not answer."
        ]

    def test_groups_are_counted_apart(self) -> None:
        pair = calls(2, 2, group="gloo 1", ranks=[0, 2])
        assert lines([calls(3), pair], [calls(9, 9)], [calls(9, 9)]) == [
            "Collective number 9: ranks 1, 2 wait in all_reduce of Float [4]; rank 0 has not called it "
            "(last call: number 3).",
            "Collective number 2 of the group of ranks 0, 2: rank 0 waits in all_reduce of Float [4]; "
            "rank 2 has not called it (no call known).",
        ]

    def test_of_a_group_with_unknown_members_only_those_that_have_called_are_named(self) -> None:
        one, other = calls(2, 2, ranks=[]), calls(1, ranks=[])
        assert lines([one], [other], []) == [
            "Collective number 2 of the group of ranks 0, 1: rank 0 waits in all_reduce of Float [4]; "
            "rank 1 has not called it (last call: number 1)."
        ]


class TestReport:
    ranks = (
        RankStatus(rank=0, host="a", heard=0.0, step=3, phase="step 3"),
        RankStatus(rank=1, host="b", heard=0.0, step=3, phase="step 3"),
    )

    def report(self, *by_rank: CollectiveCalls) -> str:
        answers = {rank: Answer("…", "in f() at f.py:1", "all_reduce", calls=[one]) for rank, one in enumerate(by_rank)}
        return describe_stall(self.ranks[0], list(self.ranks), [], answers, 9.0)

    def test_the_network_is_suspected_only_where_all_have_called(self) -> None:
        assert "Look at the network" in self.report(calls(6, 6, ranks=[0, 1]), calls(6, 6, ranks=[0, 1]))
        text = self.report(calls(6, 6, ranks=[0, 1]), calls(5, ranks=[0, 1]))
        assert "Look at the network" not in text
        assert text.splitlines()[2].startswith("Collective number 6: rank 0 waits in all_reduce")


class TestRecorder:
    """As torch 2.13 writes it."""

    @staticmethod
    def entry(number: int, call: str = "nccl:all_reduce", group: str = "0", **facts: Any) -> dict[str, Any]:
        return {
            "collective_seq_id": number,
            "process_group": [group, "default_pg"],
            "profiling_name": call,
            "is_p2p": False,
            "retired": True,
            "state": "completed",
            "input_dtypes": ["Float"],
            "input_sizes": [[2, 3]],
            **facts,
        }

    def test_the_last_call_and_the_first_that_has_not_ended(self) -> None:
        waits = {"retired": False, "state": "started"}
        record = {"entries": [self.entry(4), self.entry(5, "nccl:barrier", **waits), self.entry(6, **waits)]}
        (one,) = of_recorder(record, {"0": [0, 1]})
        assert one == {
            "group": "nccl 0",
            "ranks": [0, 1],
            "called": 6,
            "waits": 5,
            "name": "barrier of Float [2, 3]",
        }
        assert CollectiveCalls(**one)

    def test_messages_between_two_ranks_are_no_collectives(self) -> None:
        assert list(of_recorder({"entries": [self.entry(1, "nccl:send 0->1", is_p2p=True)]}, {})) == []

    def test_backends_of_one_group_are_counted_apart(self) -> None:
        record = {"entries": [self.entry(3), self.entry(7, "gloo:all_reduce")]}
        assert {one["group"]: one["called"] for one in of_recorder(record, {})} == {"nccl 0": 3, "gloo 0": 7}

    @pytest.mark.parametrize(("tensors", "shown"), [(0, ""), (2, " of Float [1], Float [1]")])
    def test_shapes(self, tensors: int, shown: str) -> None:
        entry = self.entry(1, input_dtypes=["Float"] * tensors, input_sizes=[[1]] * tensors)
        assert [one["name"] for one in of_recorder({"entries": [entry]}, {})] == [f"all_reduce{shown}"]

    def test_many_shapes_are_cut(self) -> None:
        entry = self.entry(1, input_dtypes=["Float"] * 9, input_sizes=[[1]] * 9)
        (one,) = of_recorder({"entries": [entry]}, {})
        assert one["name"] == "all_reduce of Float [1], Float [1], Float [1] and 6 more"

    def test_a_torch_without_recorders(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("torch.distributed.distributed_c10d", "torch._C._distributed_c10d"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setattr(HostMemory, "newest", None)
        assert list(counts(2)) == []

    def test_a_recorder_that_is_off(self) -> None:
        assert list(of_recorder({"version": "2.10", "pg_config": {}}, {})) == []
