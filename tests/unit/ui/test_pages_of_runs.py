"""The page's server without a browser: who is refused, the state of real runs, logs by byte offsets."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import fsspec
import httpx
import pytest
from starlette.testclient import TestClient

import tritium as tr
from tritium.errors import BadSetting, RankFailed, WrongVersion
from tritium.events import CheckpointSaved, EpochCounted, GangFormed, GangStalled, Logged, RunOpened, stamped
from tritium.gang.driver.told import told
from tritium.ui import app, logs, server
from tritium.ui.entries import KEPT
from tritium.ui.folder import RunFolder, runs_in
from tritium.ui.runs import Runs, RunView
from tritium.ui.series import POINTS, Curves, Rates, Series
from tritium.ui.summary import Summary

TOKEN = "a-token"


def client(*urls: str, host: str = "127.0.0.1", called: str = "127.0.0.1:8000", allow: tuple[str, ...] = ()) -> Any:
    return TestClient(
        app.application(Runs(urls, told), TOKEN, host, allow), f"http://{called}", raise_server_exceptions=False
    )


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a run that failed: rank 1 was killed."""
    run_dir = tmp_path_factory.mktemp("runs") / "killed"

    def train() -> None:
        world = tr.world()
        print("<b>bold</b>")
        for step in range(3):
            world.log(step=step, loss=1 / (step + 1))
        world.barrier()
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        world.barrier()

    with pytest.raises(RankFailed):
        tr.launch(train, ranks=2, on="driver", retries=0, progress=False, output="none", run_dir=str(run_dir))
    return run_dir


class TestWhoIsRefused:
    @pytest.mark.parametrize("path", ["/", "/api/runs", "/api/runs/0/events", "/api/runs/0/log", "/api/runs/0/stacks"])
    @pytest.mark.parametrize("token", ["", "?token=", "?token=another"])
    def test_one_without_the_token(self, path: str, token: str, tmp_path: Path) -> None:
        answer = client(str(tmp_path)).get(path + token)
        assert answer.status_code == 403
        assert "with its token" in answer.text

    @pytest.mark.parametrize("called", ["evil.example", "localhost.evil.example:80", "10.0.0.7:8000", "[::2]:8000"])
    def test_one_that_calls_it_by_a_strange_name(self, called: str, tmp_path: Path) -> None:
        assert client(str(tmp_path), called=called).get(f"/?token={TOKEN}").status_code == 403

    @pytest.mark.parametrize("called", ["localhost:1", "127.0.0.1:1", "[::1]:1", "127.3.2.1"])
    def test_not_the_names_of_this_machine(self, called: str, tmp_path: Path) -> None:
        assert client(str(tmp_path), called=called).get(f"/?token={TOKEN}").status_code == 200

    @pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:9999"])
    def test_a_page_of_another_site(self, origin: str, tmp_path: Path) -> None:
        pages = client(str(tmp_path))
        assert pages.get(f"/api/runs?token={TOKEN}", headers={"Origin": origin}).status_code == 403
        same = {"Origin": "http://127.0.0.1:8000"}
        assert pages.get(f"/api/runs?token={TOKEN}", headers=same).status_code == 200

    def test_a_server_for_others_takes_addresses_and_named_names(self, tmp_path: Path) -> None:
        def status(called: str) -> int:
            pages = client(str(tmp_path), host="0.0.0.0", called=called, allow=("Proxy.example",))
            return int(pages.get(f"/?token={TOKEN}").status_code)

        assert [status(name) for name in ("10.0.0.7:8000", "proxy.example", "evil.example")] == [200, 200, 403]

    @pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
    def test_whoever_would_change_something(self, method: str, tmp_path: Path) -> None:
        assert client(str(tmp_path)).request(method, f"/api/runs?token={TOKEN}").status_code == 405

    @pytest.mark.processes
    def test_other_files(self, killed: Path) -> None:
        pages = client(str(killed))
        for path in ("/static/..%2fapp.py", "/static/uPlot.LICENSE", "/api/runs/..%2f..%2fetc/log", "/api/runs/0/log"):
            assert pages.get(f"{path}?token={TOKEN}").status_code == 404, path

    def test_no_script_but_the_pages_files(self, tmp_path: Path) -> None:
        answer = client(str(tmp_path)).get(f"/?token={TOKEN}")
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'; script-src 'self'" in policy
        assert "unsafe" not in policy
        assert "http" not in answer.text.replace("http-equiv", "")


@pytest.mark.processes
class TestAKilledRank:
    def test_the_first_line_says_what_failed_and_where(self, killed: Path) -> None:
        parts, more = RunView(RunFolder(str(killed)), told).sections()
        assert not more
        head = parts["head"]
        assert head["status"] == "failed"
        assert head["failure"].startswith("Rank 1 on ")
        assert "was killed by SIGKILL" in head["failure"]
        assert head["next"]
        assert [rank["state"] for rank in parts["ranks"]] == ["ended with it", "killed by SIGKILL"]
        assert parts["metric loss"] == {"x": [0, 1, 2], "y": [1.0, 0.5, pytest.approx(1 / 3)]}
        assert parts["settings"]["ranks"] == 2

    def test_the_list_has_it_with_its_failure(self, killed: Path) -> None:
        (row,) = client(str(killed.parent)).get(f"/api/runs?token={TOKEN}").json()
        assert (row["status"], row["ranks"], row["path"]) == ("failed", 2, str(killed))
        assert "was killed by SIGKILL" in row["failure"]

    def test_its_log_comes_as_it_is(self, killed: Path) -> None:
        pages = client(str(killed))
        (row,) = pages.get(f"/api/runs?token={TOKEN}").json()
        answer = pages.get(f"/api/runs/{row['key']}/log?token={TOKEN}&rank=1")
        assert answer.json()["text"] == "<b>bold</b>\n"
        assert answer.headers["content-type"] == "application/json"

    def test_in_a_store(self, killed: Path) -> None:
        store = fsspec.filesystem("memory")
        store.put(str(killed), "/ui-test/runs/killed", recursive=True)
        try:
            (place,) = runs_in("memory://ui-test/runs")
            parts, _ = RunView(place, told).sections()
            assert parts["head"]["status"] == "failed"
            assert set(parts["logs"]) == {"0", "1"}
        finally:
            store.rm("/ui-test", recursive=True)

    def test_events_come_as_they_are_written(self, killed: Path, tmp_path: Path) -> None:
        lines = (killed / "events.jsonl").read_bytes().splitlines(keepends=True)
        file = tmp_path / "events.jsonl"
        file.write_bytes(b"".join(lines[:4]) + lines[4][:20])

        async def changes() -> tuple[dict[str, Any], dict[str, Any]]:
            stream = app._changes(RunView(RunFolder(str(tmp_path)), told), lambda: False)
            first = await anext(stream)
            file.write_bytes(b"".join(lines))
            second = await anext(stream)
            await stream.aclose()
            return tuple(json.loads(text.removeprefix("data: ")) for text in (first, second))  # type: ignore[return-value]

        first, second = anyio.run(changes)
        assert first["head"]["failure"] is None
        assert "was killed by SIGKILL" in second["head"]["failure"]
        assert "settings" in first
        assert "settings" not in second

    def test_one_line_of_a_later_version_hides_nothing_else(self, killed: Path, tmp_path: Path) -> None:
        later = b'{"kind": "of a later version"}\nnot json\n'
        (tmp_path / "events.jsonl").write_bytes(later + (killed / "events.jsonl").read_bytes())
        parts, _ = RunView(RunFolder(str(tmp_path)), told).sections()
        assert parts["head"]["unread"] == 2
        assert parts["head"]["failure"]


@pytest.mark.processes
def test_a_driver_that_was_killed_is_told(killed: Path, tmp_path: Path) -> None:
    facts = json.loads((killed / "run.json").read_text())
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    (tmp_path / "run.json").write_text(json.dumps({**facts, "pid": pid}))
    (tmp_path / "events.jsonl").write_bytes(b"".join((killed / "events.jsonl").read_bytes().splitlines(True)[:4]))
    parts, _ = RunView(RunFolder(str(tmp_path)), told).sections()
    assert parts["head"]["status"] == "gone"
    assert f"process {pid}" in parts["head"]["failure"]


class TestLogs:
    """Of 1,000 numbered lines and their pages."""

    @pytest.fixture
    def place(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
        monkeypatch.setattr(logs, "PAGE", 1000)
        monkeypatch.setattr(logs, "_BLOCK", 700)
        monkeypatch.setattr(logs, "HITS", 3)
        (tmp_path / "log").write_text("".join(f"line {number} äöü\n" for number in range(1000)))
        return RunFolder(str(tmp_path))

    def test_pages_backwards_are_the_file(self, place: RunFolder) -> None:
        end, texts = None, []
        while end != 0:
            page = logs.page_before(place, "log", end)
            assert page["text"].startswith("line ")
            texts.append(page["text"])
            end = page["start"]
        assert "".join(reversed(texts)).encode() == place.read("log")

    def test_pages_forwards_are_the_file(self, place: RunFolder) -> None:
        start, texts = 0, []
        while start < place.size("log"):
            page = logs.page_after(place, "log", start)
            texts.append(page["text"])
            start = page["end"]
        assert "".join(texts).encode() == place.read("log")

    def test_half_a_character_waits_for_its_other_half(self, tmp_path: Path) -> None:
        place = RunFolder(str(tmp_path))
        (tmp_path / "log").write_bytes("grün €".encode()[:-1])
        page = logs.page_after(place, "log", 0)
        assert page["text"] == "grün "
        (tmp_path / "log").write_text("grün €")
        assert logs.page_after(place, "log", page["end"])["text"] == "€"

    def test_a_search_goes_on_where_it_stopped(self, place: RunFolder) -> None:
        first = logs.search(place, "log", "LINE 99")
        assert [hit["text"] for hit in first["hits"]] == ["line 99 äöü", "line 990 äöü", "line 991 äöü"]
        hits, after = first["hits"], first["next"]
        while after is not None:
            more = logs.search(place, "log", "line 99", after)
            hits, after = hits + more["hits"], more["next"]
        assert len(hits) == 11
        assert all(logs.page_after(place, "log", hit["at"])["text"].startswith(hit["text"]) for hit in hits)

    def test_a_pattern_is_only_text(self, place: RunFolder) -> None:
        assert logs.search(place, "log", "l.*e")["hits"] == []

    def test_there_is_no_log(self, place: RunFolder) -> None:
        assert logs.page_before(place, "none")["text"] == ""
        assert logs.search(place, "none", "x")["hits"] == []


class TestNumbers:
    def test_steps_of_epochs_follow_one_another(self) -> None:
        curves = Curves()
        for epoch in range(3):
            for step in range(4):
                curves.log(Logged(rank=0, epoch=epoch, step=step, values={"loss": 10 * epoch + step}))
                curves.log(Logged(rank=1, epoch=epoch, step=step, values={"loss": -1}))
        assert curves.steps["loss"].x == list(range(12))
        assert curves.epochs["loss"].to_json() == {"x": [0, 1, 2], "y": [3, 13, 23]}

    def test_a_retry_replaces_what_it_repeats(self) -> None:
        series = Series()
        for x, y in [(0, 1.0), (1, 2.0), (2, 3.0), (1, 5.0)]:
            series.add(x, y)
        assert (series.x, series.y) == ([0, 1], [1.0, 5.0])

    def test_long_series_are_thinned_to_the_end(self) -> None:
        series = Series()
        for x in range(10 * POINTS):
            series.add(x, float(x))
        assert POINTS // 2 <= len(series.x) <= POINTS
        assert (series.x[0], series.x[-1]) == (0, 10 * POINTS - 1)
        assert series.x == sorted(series.x)

    def test_what_is_not_finite_is_a_gap(self) -> None:
        curves = Curves()
        curves.log(Logged(rank=0, step=0, values={"loss": "NaN"}))
        assert curves.steps["loss"].y == [None]

    def test_rows_a_second(self) -> None:
        rates = Rates()
        for second in range(5):
            rates.log(Logged(rank=0, rows=100 * second), float(second))
        assert rates.series[0].y == [100.0] * 4


class TestSummary:
    def test_entries_of_checkpoints_push_no_other_out(self) -> None:
        summary = Summary("/run", told)
        summary.event(stamped(RunOpened(settings={}, versions={})))
        for step in range(3 * KEPT):
            summary.event(stamped(CheckpointSaved(rank=0, step=step, bytes=1, seconds=0.1, path="p")))
        events = summary.sections()["events"]
        assert len(events) == KEPT + 1
        assert events[0]["text"] == "the run began"

    def test_a_stall_that_is_only_reported_ends_with_the_next_step(self) -> None:
        summary = Summary("/run", told)
        summary.event(stamped(GangStalled(text="rank 0 on a hangs.\n\nWhere", rank=0)))
        parts = summary.sections()
        assert parts["head"]["stall"]
        assert parts["ranks"][0]["state"] == "hangs"
        assert parts["events"][0]["details"] == "Where"
        summary.event(stamped(Logged(rank=0, step=1)))
        parts = summary.sections()
        assert parts["head"]["stall"] is None
        assert parts["ranks"][0]["state"] == "running"

    def test_rows_by_shard(self) -> None:
        summary = Summary("/run", told)
        summary.event(stamped(EpochCounted(rank=0, name="train", steps=3, rows=7, used=7, padded=2)))
        assert (
            summary.sections()["data"]["train"][0] | {"padded": 2, "used": 7} == summary.sections()["data"]["train"][0]
        )


def test_a_run_that_goes_on_has_metrics(tmp_path: Path) -> None:
    facts = {"run": "a", "started": "2026-01-01T00:00:00+00:00", "host": "another", "pid": 1}
    (tmp_path / "run.json").write_text(json.dumps(facts))
    events = [
        RunOpened(settings={}, versions={}),
        Logged(rank=0, step=3, rows=70, values={'the "loss"': 0.5, "broken": "NaN"}),
    ]
    (tmp_path / "events.jsonl").write_text("".join(f"{stamped(event).to_json()}\n" for event in events))
    answer = client(str(tmp_path)).get(f"/metrics?token={TOKEN}")
    assert answer.headers["content-type"].startswith("text/plain")
    samples = [line for line in answer.text.splitlines() if not line.startswith("#")]
    assert samples == [
        'tritium_run_ranks{run="a"} 1',
        'tritium_run_failed{run="a"} 0',
        'tritium_run_value{run="a",name="the \\"loss\\""} 0.5',
        'tritium_rank_step{run="a",rank="0"} 3',
        'tritium_rank_rows{run="a",rank="0"} 70',
    ]
    assert client(str(tmp_path)).get("/metrics").status_code == 403


def test_a_port_that_is_taken_is_told(tmp_path: Path) -> None:
    first = server.page([str(tmp_path)], told)
    with first.socket, pytest.raises(BadSetting, match="The page can't listen on 127"):
        server.page([str(tmp_path)], told, port=first.socket.getsockname()[1])


@pytest.fixture
def _stopped() -> Iterator[None]:
    yield
    server.stop()


@pytest.mark.processes
@pytest.mark.usefixtures("_stopped")
@pytest.mark.parametrize("scheme", ["", "file://"])  # A store is written when the run has ended, and seen before that.
def test_a_driver_serves_its_runs(scheme: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    go_on = tmp_path / "go on"

    def train() -> None:
        tr.world().log(step=0, loss=1.0)
        while not go_on.exists():
            time.sleep(0.01)

    def parts_until(text: str) -> None:
        with httpx.stream("GET", f"{base}api/runs/{key}/events?{query}", timeout=60) as answer:
            assert any(text in line for line in answer.iter_lines())

    run_dir = f"{scheme}{tmp_path}/run"
    with tr.submit(train, ranks=1, on="driver", ui=True, output="none", run_dir=run_dir) as run:
        events = run.events()
        while not isinstance(next(events), GangFormed):
            pass
        address = re.search(r"the page of this run: (\S+)", capfd.readouterr().out)
        assert address
        base, query, key = re.split("[?#]", address[1])
        parts_until('"metric loss"')
        parts_until('"memory": ')
        go_on.touch()
        run.result(60)
    parts_until('"status": "succeeded"')
    assert not (tmp_path / "run" / "ranks.json").exists()
    assert query not in (tmp_path / "run" / "events.jsonl").read_text()
    (row,) = httpx.get(f"{base}api/runs?{query}").json()
    assert (row["status"], row["path"]) == ("succeeded", run_dir)


@pytest.mark.usefixtures("_stopped")
def test_the_logging_of_the_program_stays_as_it_is(tmp_path: Path) -> None:
    silent = logging.getLogger(f"{__name__}.silent")
    silent.disabled = True
    handler = logging.FileHandler(tmp_path / "log", mode="w")
    silent.addHandler(handler)
    try:
        server.show(str(tmp_path), str(tmp_path), told)
        silent.error("this is not wanted")
        silent.disabled = False
        silent.error("this is")
    finally:
        silent.removeHandler(handler)
        handler.close()
    assert (tmp_path / "log").read_text() == "this is\n"


def test_a_page_that_cannot_be_served_is_told_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(WrongVersion, match=r"pip install 'tritium\[ui\]'"):
        tr.launch(lambda: None, on="here", ui=True, run_dir=str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
