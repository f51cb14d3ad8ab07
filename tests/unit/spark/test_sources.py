"""A source that moves no count, by what a Connect server reports; faults/test_source_stall.py has the classic one."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tritium.spark.session import Session
from tritium.spark.sources import ConnectSourceWatch

LIMIT, RANKS = 0.05, 2


@pytest.fixture
def watch() -> ConnectSourceWatch:
    watch = ConnectSourceWatch(cast(Session, None), "tag")  # It asks the session for nothing.
    watch.look(RANKS)
    return watch


def stage(number: int, tasks: int, completed: int, read: int = 0) -> Any:
    return SimpleNamespace(stage_id=number, num_tasks=tasks, num_completed_tasks=completed, num_bytes_read=read)


def test_a_stage_whose_counts_stand_still_is_a_stall(watch: ConnectSourceWatch) -> None:
    watch.heard(2, [stage(0, 3, 3), stage(1, 8, 6)])
    assert watch.stalled(LIMIT) is None
    time.sleep(2 * LIMIT)
    stall = watch.stalled(LIMIT)
    assert stall is not None
    assert (stall.stage, stall.tasks) == (1, 2)
    assert stall.text.startswith(
        "the source makes no progress: in stage 1 of Spark's, 6 of 8 tasks have ended, and for"
    )
    assert stall.limit == pytest.approx(10 * LIMIT)
    watch.heard(2, [stage(0, 3, 3), stage(1, 8, 6, read=1)])
    assert watch.stalled(LIMIT) is None


@pytest.mark.parametrize("stages", [[stage(1, RANKS, 0)], [stage(1, 8, 8)], [stage(1, 8, 0), stage(2, RANKS, 0)], []])
def test_what_may_be_the_gangs_own_stage_is_none(watch: ConnectSourceWatch, stages: list[Any]) -> None:
    watch.heard(2, stages)
    assert watch.stalled(LIMIT) is None
    time.sleep(2 * LIMIT)
    assert watch.stalled(LIMIT) is None


def test_without_running_tasks_nothing_hangs(watch: ConnectSourceWatch) -> None:
    watch.heard(0, [stage(1, 8, 6)])
    assert watch.stalled(LIMIT) is None
    time.sleep(2 * LIMIT)
    assert watch.stalled(LIMIT) is None
