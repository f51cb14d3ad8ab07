"""`tritium ui` as a reader has it: the command serves real runs, and Chromium shows them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import tritium as tr
from tritium.errors import RankFailed
from tritium.events import MicroBatchScored
from tritium.model.signature import Input, Output, Signature
from tritium.predict.query_run import QueryRun

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
LOOK = (ROOT / "tests" / "pages" / "look.js").read_text()
WIDTHS = (1280, 400)  # px: a laptop, a phone
LINES = 1_000_000


@contextmanager
def served(*arguments: str) -> Iterator[str]:
    """Run `tritium ui`; yields the address that it prints."""
    command = [sys.executable, "-u", "-c", "from tritium.cli import main; main()", "ui", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        try:
            yield program.stdout.readline().strip()
        finally:
            program.send_signal(signal.SIGINT)
            assert program.wait(30) == 0


@pytest.fixture
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def is_problem(line: Any) -> bool:
    return line.type == "error" and "net::ERR_" not in line.text


@pytest.fixture
def page(chromium: Any) -> Iterator[Any]:
    """Yield a page on which no script fails, and which asks no other host."""
    problems: list[str] = []
    page = chromium.new_page(viewport={"width": WIDTHS[0], "height": 900})
    page.on("pageerror", lambda error: problems.append(str(error)))
    # With the server the page loses its connection: net::ERR_CONNECTION_REFUSED.
    page.on("console", lambda line: problems.append(line.text) if is_problem(line) else None)
    page.on("request", lambda r: None if r.url.startswith(("http://127.0.0.1:", "data:")) else problems.append(r.url))
    yield page
    page.close()
    assert not problems


def open_run(page: Any, address: str) -> None:
    page.goto(address)
    page.click("#runs tbody a")
    page.wait_for_selector("#events li")


def shows(page: Any, selector: str, text: str) -> None:
    """Wait until an element contains the text. The page forbids `eval`, so scripts can't wait in it."""
    page.locator(selector).filter(has_text=text).wait_for(timeout=60_000)


def test_a_run_is_watched_live_and_a_rank_is_killed(page: Any, tmp_path: Path) -> None:
    def train() -> None:
        world = tr.world()
        for step in range(100_000):
            print("step", step, flush=True)
            world.log(step=step, loss=1 / (step + 1))
            time.sleep(0.05)  # the work of a step

    run_dir = str(tmp_path / "runs" / "live")
    with (
        tr.submit(train, ranks=2, on="driver", retries=0, progress=False, output="none", run_dir=run_dir) as run,
        served(str(tmp_path / "runs")) as address,
    ):
        open_run(page, address)
        page.wait_for_selector("#ranks tbody tr:nth-child(2) >> text=running")
        page.wait_for_selector("#ranks tbody tr:nth-child(2) >> text=/\\d MB/")
        shows(page, "#log-text", "step 3")
        position = page.inner_text("#position")
        page.wait_for_selector(f"#position:not(:text-is('{position}'))")
        assert page.inner_text("#status") == "running"
        heads = page.locator("#ranks thead th").all_inner_texts()
        pid = int(page.locator("#ranks tbody tr:nth-child(2) td").nth(heads.index("pid")).inner_text())

        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        shows(page, "#headline", "was killed by SIGKILL")
        seconds = time.monotonic() - killed
        print(f"The page shows the killed rank after {seconds:.2f} s.")
        assert seconds < 20
        assert page.inner_text("#headline").startswith("Rank 1 on ")
        page.wait_for_selector("#status >> text=failed")
        assert page.inner_text("#next").startswith("Next: ")
        with pytest.raises(RankFailed):
            run.result(60)


def test_the_text_of_a_run_is_no_markup(page: Any, tmp_path: Path) -> None:
    markup = "<img src=x onerror=\"document.title='broken into'\"><script>document.title='broken into'</script>"

    def train() -> None:
        print(markup)
        tr.world().log(step=0, **{markup: 1.0})
        raise ValueError(markup)

    with pytest.raises(RankFailed):
        tr.launch(train, ranks=1, on="driver", progress=False, output="none", run_dir=str(tmp_path / "run"))
    with served(str(tmp_path)) as address:
        open_run(page, address)
        shows(page, "#log-text", markup)
        assert markup in page.inner_text("#headline")
        page.click("#whole summary")
        page.fill("#text", "onerror")
        page.keyboard.press("Enter")
        page.wait_for_selector("#hits button >> text=onerror")
        assert not page.query_selector("main img, main script")
        assert page.title().startswith("failed: ")


@pytest.fixture(scope="module")
def long_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a run that printed LINES lines."""
    run_dir = tmp_path_factory.mktemp("long") / "run"

    def train() -> None:
        for first in range(0, LINES, 10_000):
            print(
                "\n".join(
                    f"line {number} of the log of a rank that says a lot" for number in range(first, first + 10_000)
                )
            )
        tr.world().log(step=0, loss=1.0)

    tr.launch(train, ranks=1, on="driver", progress=False, output="none", run_dir=str(run_dir))
    return run_dir


def test_a_million_lines_stay_usable(page: Any, long_log: Path) -> None:
    last = f"line {LINES - 1} of"
    with served(str(long_log)) as address:
        page.goto(address)
        page.wait_for_selector("#runs tbody a")
        begun = time.monotonic()
        page.click("#runs tbody a")
        shows(page, "#log-text", last)
        print(f"The end of {LINES:,} lines is there after {time.monotonic() - begun:.2f} s.")
        page.click("#earlier")
        page.wait_for_selector(f"#log-text:not(:has-text('{last}'))")
        begun = time.monotonic()
        page.fill("#text", "LINE 77777")
        page.keyboard.press("Enter")
        page.click("#hits button >> text=line 77777 of")
        shows(page, "#log-text", "line 77777 of")
        print(f"A line in them is found after {time.monotonic() - begun:.2f} s.")
        assert len(page.inner_text("#log-text")) < 1 << 20
        page.click("#end")
        shows(page, "#log-text", last)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a training of two ranks, with validation, trace and checkpoints."""
    import numpy as np
    import pandas as pd
    import torch

    from tritium.ml import fit

    run_dir = tmp_path_factory.mktemp("trained") / "run"
    table = pd.DataFrame({"x": np.linspace(0, 1, 4000)})
    table["y"] = 3 * table["x"]
    fit(
        table,
        model=lambda: torch.nn.Linear(1, 1),
        loss=torch.nn.MSELoss(),
        optimizer=torch.optim.Adam,
        feature_cols=["x"],
        label_cols=["y"],
        epochs=4,
        validation=0.2,
        ranks=2,
        on="driver",
        trace=True,
        progress=False,
        run_dir=str(run_dir),
        checkpoint_every="1s",
    )
    return run_dir


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_of_it_can_be_read_on_a_laptop_and_a_phone(scheme: str, chromium: Any, trained: Path) -> None:
    page = chromium.new_page(viewport={"width": WIDTHS[0], "height": 900}, color_scheme=scheme)
    with served(str(trained)) as address:
        open_run(page, address)
        page.wait_for_selector("figure canvas")
        titles = page.locator("figcaption").all_inner_texts()
        assert "loss" in titles
        assert "rows/s" in titles
        assert "validation_loss" in page.inner_text("#charts")
        rows = page.locator("#signature tbody tr").all_inner_texts()
        assert [row.split("\t")[:4] for row in rows] == [
            ["input", "features", "float32", "(1)"],
            ["output", "prediction", "float32", "(1)"],
        ]
        assert page.locator("#shards table").first.locator("tbody tr:last-child td").first.inner_text() == "all"
        assert page.is_hidden("#ranges")
        assert "shape of a row" in (trained / "report.html").read_text()
        problems = []
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            problems += [f"at {width} px: {line}" for line in page.evaluate(LOOK)]
        assert not problems
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor").startswith("rgb(20")
        assert dark == (scheme == "dark")
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_streaming_query_that_scores(scheme: str, page: Any, tmp_path: Path) -> None:
    ranges = {"a": {"nulls": 0.25, "range": [-1.5, 41.0]}}
    signature = Signature((Input("x", ("a",), "float32", ()),), (Output("y"),), ranges=ranges)
    run = QueryRun(str(tmp_path / "bikes"), "bikes", signature)

    def scored(batch: int, rows: int) -> None:
        figures = {"model_ms_p50": 1.5, "model_ms_p99": 2.5, "model_version": 7, "bad_rows": 3}
        run.event(MicroBatchScored(metrics="bikes", query="q", batch=batch, rows=rows, seconds=0.5, **figures))

    scored(0, 100)
    page.emulate_media(color_scheme=scheme)
    with served(str(tmp_path)) as address:
        open_run(page, address)
        shows(page, "#headline", "model version 7, micro-batch 0: 100 rows in 0.50 s")
        assert page.is_hidden("#all-ranks")
        assert page.is_hidden("#x")  # All of a query's charts are over time.
        assert page.locator("#ranges tbody td").all_inner_texts() == ["a", "25 %", "-1.5", "41"]
        scored(1, 400)
        shows(page, "#batches tbody tr:nth-child(1)", "400")
        shows(page, "#batches tbody tr:nth-child(2)", "500")
        heads = page.locator("#batches thead th").all_inner_texts()
        assert {"rows/s", "p50 s", "p99 s", "bad rows", "model version", "model ms p99"} <= set(heads)
        assert page.locator("figcaption").all_inner_texts() == ["rows/s", "micro-batch seconds", "model ms", "bad rows"]
        problems = []
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            problems += [f"at {width} px: {line}" for line in page.evaluate(LOOK)]
        assert not problems
        run.ended("org.apache.spark.SparkException: no picture\n\tat a.b")
        shows(page, "#headline", "The query failed: ")
        shows(page, "#headline", "no picture")
        assert page.inner_text("#status") == "failed"


KEEP_TEXTS = """
const write = CanvasRenderingContext2D.prototype.fillText;
window.written = new Set();
CanvasRenderingContext2D.prototype.fillText = function (text, ...more) {
  window.written.add(text);
  return write.call(this, text, ...more);
};
"""


def test_ticks_of_small_numbers_are_told_apart(page: Any, trained: Path) -> None:
    page.add_init_script(KEEP_TEXTS)
    with served(str(trained)) as address:
        open_run(page, address)
        page.wait_for_selector("figcaption >> text=learning_rate")
        page.wait_for_function("window.written.has('0.0015')")


def test_charts_by_keyboard(page: Any, trained: Path) -> None:
    with served(str(trained)) as address:
        open_run(page, address)
        page.wait_for_selector("figure canvas")
        page.select_option("#x", "epochs")
        page.check("#log")
        page.wait_for_selector("figure canvas")
        page.focus("#charts [tabindex]")
        page.keyboard.press("+")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("0")


def test_a_strange_token_shows_nothing(page: Any, trained: Path) -> None:
    with served(str(trained)) as address:
        answer = page.request.get(address[:-1])
        assert answer.status == 403
        assert page.request.get(address, headers={"Host": "evil.example"}).status == 403
        assert page.request.get(address, headers={"Origin": "http://evil.example"}).status == 403
