"""Everything that a rank sends fits into a message: texts are cut, and too large values are refused at the call."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tritium as tr
from tritium.errors import BadSetting, RankFailed, TooLarge, TritiumError, TritiumWarning
from tritium.gang.coordinator import all_gather
from tritium.gang.failure import PICKLED_BYTES, Failure
from tritium.wire import MAX_BLOB, Message, Packed, clip, escaped


def run(fn: Callable[..., Any], ranks: int = 2, **settings: Any) -> list[Any]:
    return tr.launch(fn, ranks=ranks, on="driver", **{"progress": False, "output": "none", "retries": 0, **settings})


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = folder.joinpath("events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


class TestClip:
    @given(st.text(), st.integers(1, 4000), st.integers(0, 400))
    def test_fits_and_keeps_both_ends(self, word: str, times: int, limit: int) -> None:
        text = word * times
        short = clip(text, limit)
        assert escaped(short) <= max(limit, 0)
        if escaped(text) <= limit:
            assert short == text
        elif short:
            head, _, tail = short.partition(" … [")
            assert text.startswith(head)
            assert text.endswith(tail.partition("] … ")[2])

    def test_says_how_much_is_left_out(self) -> None:
        assert clip("a" * 5000 + "b" * 5000, 1064) == "a" * 500 + " … [9,000 characters left out] … " + "b" * 500


sizes = st.sampled_from([0, 1, 1000, 70_000, 300_000, 1_200_000])
letters = st.sampled_from(["a", "é", "\U0001f40b", "\udc80", "\n", '"', "\x00"])
texts = st.builds(lambda letter, size: letter * size, letters, sizes)
failures = st.builds(
    Failure,
    how=st.sampled_from(["exception", "signal", "exit", "lost", "orphaned", "error", "stalled", "regroup"]),
    rank=st.integers(0, 5000),
    host=texts,
    type=texts,
    text=texts,
    traceback=texts,
    signal=st.none() | texts,
    log=st.lists(texts, max_size=40).map(tuple),
    others=st.lists(texts, max_size=20).map(tuple),
    memory=st.none() | st.fixed_dictionaries({"note": texts, "peak": st.integers(0, 1 << 60)}),
    at=st.fixed_dictionaries({"step": st.integers(0, 9), "phase": texts}),
    stacks=st.dictionaries(st.integers(0, 3000), texts, max_size=30),
)


@settings(max_examples=60)
@given(failures)
def test_a_failure_can_always_be_sent(failure: Failure) -> None:
    """As a supervisor tells it, and as the coordinator tells it to every other one."""
    Packed.of(Message("failed", failure.fields(), failure.pickled))
    told = Packed.of(Message("end", {"reason": failure.headline(), "failure": failure.with_stacks()}))
    assert Failure.read(json.loads(told.header)["failure"], b"").rank == failure.rank


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


def deep() -> None:
    """Recurse through two functions, so that Python does not fold the traceback."""
    sys.setrecursionlimit(9000)

    def ping(n: int) -> None:
        pong(n)

    def pong(n: int) -> None:
        if not n:
            raise ValueError("at the bottom")
        ping(n - 1)

    ping(2000)


def bars() -> None:
    """Write what thirty progress bars without line ends leave behind."""
    for _ in range(30):
        print("\r".join(f"{percent}% " + "#" * 640 for percent in range(100)), file=sys.stderr)
    raise ValueError("after the bars")


def lines() -> None:
    for _ in range(30):
        print("x" * 65_000, file=sys.stderr)
    raise ValueError("after the lines")


def long_text() -> None:
    raise ValueError("begins" + "x" * 600_000 + "ends")


def large() -> None:
    error = ValueError("holds an array")
    error.array = np.zeros(PICKLED_BYTES // 8)  # type: ignore[attr-defined]
    raise error


def mute() -> None:
    raise Mute


def chained() -> None:
    try:
        raise KeyError("k" * 400_000)
    except KeyError as error:
        raise ValueError("x" * 400_000) from error


def closed_stdout() -> None:
    sys.stdout.close()
    raise ValueError("without a stdout")


@pytest.mark.processes
@pytest.mark.parametrize("train", [deep, bars, lines, long_text, large, mute, chained, closed_stdout])
def test_an_exception_of_any_size_is_the_ranks_own_and_no_loss(train: Callable[[], None], tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as caught:
        run(train, retries=2, run_dir=str(tmp_path))
    error = caught.value
    assert error.lost is False
    assert json.loads((tmp_path / "report.json").read_text())["retries"] == []
    assert ("Mute" if train is mute else "raised ValueError: ") in str(error)
    assert train.__name__ in error.traceback
    if train is bars:
        assert {line[:4] for line in error.log[-10:]} == {"99% "}
    elif train is lines:
        assert all("characters left out" in line for line in error.log[-10:])
    elif train is long_text:
        assert str(error.__cause__) == "begins" + "x" * 600_000 + "ends"
        assert "characters left out" in str(error).partition("\n")[0]
    elif train is large:
        assert error.__cause__ is None
        assert "over the limit of 4,194,304" in error.log[0]


@pytest.mark.processes
class TestGather:
    def test_a_value_that_is_too_large_is_refused_where_it_is_given(self, tmp_path: Path) -> None:
        def train() -> None:
            world = tr.world()
            world.gather(bytes(MAX_BLOB + 1) if world.rank == 1 else b"")

        with pytest.raises(
            TooLarge, match=r"world\.gather\(\): the value of rank 1 is 268,435,4\d\d bytes pickled"
        ) as e:
            run(train, retries=1, run_dir=str(tmp_path))
        assert (e.value.rank, e.value.limit) == (1, MAX_BLOB)
        assert e.value.size > MAX_BLOB

    def test_too_much_together_is_the_same_error_on_every_rank_and_the_gang_goes_on(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(all_gather, "MAX_BLOB", 1_000_000)  # of the coordinator, which is in this process

        def train() -> tuple[str, list[int]]:
            world = tr.world()
            said = ""
            try:
                world.gather(bytes(400_000 + world.rank))
            except TritiumError as error:
                said = str(error)
            return said, world.gather(world.rank)

        results = run(train, ranks=4)
        assert len({said for said, _ in results}) == 1
        assert results[0][0].startswith("world.gather(): the values of 3 of 4 ranks are 1,2")
        assert "one call takes 1,000,000 of all ranks" in results[0][0]
        assert [numbers for _, numbers in results] == [[0, 1, 2, 3]] * 4


@pytest.mark.processes
def test_arguments_over_the_size_of_a_message_reach_the_ranks() -> None:
    array = np.arange((MAX_BLOB >> 3) + 1000, dtype=np.float64)  # 256 MiB and a little

    def train(array: Any) -> float:
        return float(array[-1])

    with pytest.warns(TritiumWarning, match="MB, sent with every task"):
        assert run(train, 1, args=(array,)) == [float(len(array) - 1)]


@pytest.mark.processes
class TestWhatARankTells:
    def test_thousands_of_logged_values_are_kept(self, tmp_path: Path) -> None:
        names = [f"layer{number}.weight.gradient.norm" for number in range(5000)]
        run(lambda: tr.world().log(step=1, **dict.fromkeys(names, 0.5)), 1, run_dir=str(tmp_path))
        (event,) = events(tmp_path, "log")
        assert len(event["values"]) == 5000

    def test_too_many_are_refused_where_they_are_logged(self, tmp_path: Path) -> None:
        def train() -> None:
            tr.world().log(**{f"a_rather_long_name_of_a_value_{number}": 0.0 for number in range(40_000)})

        with pytest.raises(
            BadSetting, match=r"world\.log\(\): 40,000 values with their names are 1,[\d,]+ bytes; one call"
        ):
            run(train, 1, retries=1, run_dir=str(tmp_path))
        assert json.loads((tmp_path / "report.json").read_text())["retries"] == []

    def test_a_long_note_is_cut(self, tmp_path: Path) -> None:
        run(lambda: tr.world().note("begins" + "x" * 2_000_000 + "ends"), 1, run_dir=str(tmp_path))
        (note,) = (event["text"] for event in events(tmp_path, "note"))
        assert note.startswith("begins")
        assert note.endswith("ends")
        assert len(note) <= 1 << 16

    def test_a_thread_with_a_long_name_and_a_long_exception(self, tmp_path: Path) -> None:
        def train() -> int:
            def work() -> None:
                raise ValueError("x" * 2_000_000)

            thread = threading.Thread(target=work, name="n" * 2_000_000)
            thread.start()
            thread.join()
            return 1

        with pytest.warns(TritiumWarning, match="raised ValueError: xxx"):
            assert run(train, 1, run_dir=str(tmp_path)) == [1]
