"""The watermark: the rows that every rank has, and the threads that wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from tritium.data.steps import Feed, Watermark, WatermarkTracker


class Told:
    """A rank's watermark, built from changes alone."""

    def __init__(self, size: int) -> None:
        self.feed = Feed()
        self.mark = Watermark(0, {}, size)

    def publish(self, change: Watermark) -> None:
        self.feed.publish(change)
        self.mark = self.feed.wait(0)


@given(
    size=st.integers(1, 4),
    reports=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.booleans(), st.booleans()), max_size=30),
)
def test_the_mark_never_promises_what_a_rank_lacks(size: int, reports: list[tuple[int, int, bool, bool]]) -> None:
    tracker, rows, ended, told = WatermarkTracker(size), [0] * size, set[int](), Told(size)
    for index, more, end, tell in reports:
        if index >= size or index in ended:
            continue
        before = tracker.watermark
        rows[index] += more
        if end:
            ended.add(index)
        moved = tracker.report(index, rows[index], end)
        assert moved == (tracker.watermark != before)
        if tell:
            change = tracker.change()
            assert (change is None) == (tracker.watermark == told.mark)
            if change is not None:
                assert not (told.mark.ended.keys() & change.ended.keys())  # each end is told once
                told.publish(change)
            assert told.mark == tracker.watermark
        assert tracker.watermark.ended == {i: rows[i] for i in ended}
        going = [rows[i] for i in range(size) if i not in ended]
        assert tracker.watermark.rows == (min(going) if going else max(rows))
        assert tracker.watermark.rows >= before.rows
        assert tracker.watermark.complete == (len(ended) == size)


def waiting(ask: Callable[[], object], answers: list[object]) -> threading.Thread:
    """Return a thread that asks, and keeps the answer."""
    thread = threading.Thread(target=lambda: answers.append(ask()))
    thread.start()
    return thread


def test_a_waiter_is_woken_by_the_rows_it_waits_for() -> None:
    feed, answers = Feed(), list[object]()
    thread = waiting(lambda: feed.wait(5), answers)
    feed.publish(Watermark(4, {}, 2))
    assert not answers
    feed.publish(Watermark(5, {}, 2))
    thread.join()
    assert answers == [Watermark(5, {}, 2)]


def test_waiters_are_woken_by_the_end() -> None:
    feed, answers = Feed(), list[object]()
    threads = [waiting(feed.counts, answers), waiting(lambda: feed.wait(10).rows, answers)]
    feed.publish(Watermark(5, {1: 5}, 2))
    assert not answers
    feed.publish(Watermark(6, {0: 6, 1: 5}, 2))
    for thread in threads:
        thread.join()
    assert sorted(map(str, answers)) == ["6", "[6, 5]"]


def test_counts_are_in_the_order_of_the_indices() -> None:
    tracker, feed = WatermarkTracker(3), Feed()
    for index, rows in ((2, 7), (0, 3), (1, 5)):
        assert tracker.report(index, rows, True)
        mark = tracker.change()
        assert mark is not None
        feed.publish(mark)
    assert feed.counts() == [3, 5, 7]
    assert feed.wait(10**9).complete
