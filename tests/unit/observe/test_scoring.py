"""The progress of a scoring into a table."""

from __future__ import annotations

import io

from tritium.observe.scoring import ScoringProgress


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_lines_elsewhere_than_on_a_terminal() -> None:
    clock, stream = Clock(), io.StringIO()
    progress = ScoringProgress(10, 4, "tritium: scoring", live=False, stream=stream, clock=clock)
    clock.seconds = 2.0
    progress.update(5, 1000)
    assert progress.text() == "5 of 10 source partitions, 1,000 rows, 500 rows/s, 0:10 left"
    clock.seconds = 8.0
    progress.update(8, 3000)
    progress.update(7, 3000)  # A task that Spark repeats: what was shown stays.
    clock.seconds = 9.0
    progress.update(10, 4000)
    assert progress.seconds_left is None
    progress.close("done")
    assert stream.getvalue().splitlines() == [
        "tritium: scoring: 4 of 10 source partitions were scored before and are kept",
        "tritium: scoring: 8 of 10 source partitions, 3,000 rows, 375 rows/s, 0:04 left",
        "tritium: scoring: done",
    ]


def test_a_bar_on_a_terminal() -> None:
    stream = io.StringIO()
    progress = ScoringProgress(10, 0, "tritium: scoring", live=True, stream=stream)
    progress.update(5, 1000)
    progress.close("done, 1,000 rows")
    progress.close()
    assert "5 of 10" in stream.getvalue()
    assert stream.getvalue().rstrip().endswith("tritium: scoring: done, 1,000 rows")


def test_a_closed_stream_does_not_end_the_scoring() -> None:
    stream = io.StringIO()
    progress = ScoringProgress(10, 4, "tritium: scoring", live=False, stream=stream)
    stream.close()
    progress.close("done")
    assert not ScoringProgress(10, 0, "", show=False, live=False, stream=stream).close("done")
