"""report.html: what a person reads of a run that has ended."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

import tritium as tr
from tritium.errors import RankFailed
from tritium.events import Logged, Note
from tritium.observe.page import RunPage, of_history
from tritium.observe.report import Report


class Reader(HTMLParser):
    """The tags and the text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.words: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)


def _trains(fail: bool) -> None:
    world = tr.world()
    for step in range(3):
        world.log(step=step, loss=1 / (1 + step), accuracy=0.1 * step)
    if fail and world.rank == 1:
        raise ValueError("<script>alert(1)</script>")


@pytest.mark.processes
@pytest.mark.parametrize("fail", [False, True])
def test_a_page_beside_the_report(fail: bool, tmp_path: Path) -> None:
    settings = {"ranks": 2, "on": "driver", "run_dir": str(tmp_path), "progress": False, "env": {"KEY": "hidden"}}
    if fail:
        with pytest.raises(RankFailed):
            tr.launch(_trains, args=(True,), **settings)
    else:
        tr.launch(_trains, args=(False,), **settings)
    page = tmp_path.joinpath("report.html").read_text()
    read = Reader(page)
    assert "hidden" not in page
    assert "script" not in read.tags
    assert not re.search(r"(src|href)=", page)  # It loads nothing.
    assert read.tags.count("polyline") == 2
    assert "stall_timeout" in read.text
    if fail:
        error = next(text for text in read.words if "raised ValueError" in text)
        assert "failed after" in read.text
        assert "raised ValueError: <script>alert(1)</script>" in error
        assert "in _trains" in error
    else:
        assert "succeeded after" in read.text


@pytest.mark.processes
def test_a_notebook_shows_a_run_and_a_model(tmp_path: Path) -> None:
    with tr.submit(_trains, args=(False,), ranks=2, on="driver", run_dir=str(tmp_path), progress=False) as run:
        run.result()
        read = Reader(run._repr_html_())
    assert f"Run {run.id} succeeded" in read.text
    assert read.tags.count("polyline") == 2
    curves = of_history([{"epoch": n, "loss": 1 / n, "validation_loss": 2 / n, "rows": 7} for n in range(1, 4)])
    assert Reader(curves).text.split() == ["2", "0.3333", "1", "epoch", "3", "loss", "validation_loss"]


def test_a_long_run_keeps_a_bounded_curve_with_both_ends() -> None:
    page = RunPage()
    for step in range(100_000):
        page.add(Logged(rank=0, step=step, values={"loss": float(step), "broken": "NaN"}))
    page.add(Note(text="a & b"))
    body = page.body(Report("a-run", "/runs/a", {"ranks": 1}).build())
    points = re.findall(r"points='([^']*)'", body)
    assert len(points) == 1
    assert 400 < len(points[0].split()) <= 801
    assert ">0</text>" in body
    assert ">step 99,999</text>" in body
    assert "a &amp; b" in body


def test_an_attempt_begins_a_new_line_of_the_chart() -> None:
    page = RunPage()
    for step in (0, 1, 2, 3, 1, 2, 3, 4):
        page.add(Logged(rank=0, step=step, values={"loss": float(step)}))
    body = page.body(Report("a-run", "/runs/a", {"ranks": 1}).build())
    assert [len(points.split()) for points in re.findall(r"points='([^']*)'", body)] == [4, 4]


def test_the_ranks_have_steps_from_1_and_no_empty_columns() -> None:
    report = Report("a-run", "/runs/a", {"ranks": 1}).build()
    ranks = [{"rank": 0, "devices": [], "logged": {"step": 60, "steps": 200, "loss": 0.5}}, {"rank": 1, "devices": []}]
    text = Reader(RunPage().body({**report, "ranks": ranks})).text
    assert "last step" in text
    assert "61 of 200" in text
    assert "devices" not in text
    assert "last steps" not in text
