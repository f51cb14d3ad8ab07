"""The files of a run, and the report made from its events."""

from __future__ import annotations

import json
import os
import re
import resource
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from tritium.errors import BadSetting, StoreFailed
from tritium.events import (
    EpochCounted,
    FileStored,
    GangFailed,
    GangFormed,
    GangRetried,
    GangStarted,
    Logged,
    Note,
    RowsCounted,
    RowsReceived,
    RunEnded,
    StepsTraced,
    Waiting,
)
from tritium.observe.report import Report
from tritium.observe.run_directory import RunLog, new_run_dir
from tritium.observe.stored import PIECE, cut

ANOTHER_ATTEMPT = {
    "retry": GangRetried(number=1, of=2, start=None, reason="rank 1 was lost"),
    "started": GangStarted(ranks=2),
}


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in folder.joinpath("events.jsonl").read_text().splitlines()]


class TestWhereARunIs:
    def test_below_the_variable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TRITIUM_RUNS", "s3://bucket/runs/")
        run_id, path = new_run_dir(None)
        assert path == f"s3://bucket/runs/{run_id}"
        assert re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{6}", run_id)
        assert new_run_dir(None)[0] != run_id

    def test_else_below_the_working_directory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("TRITIUM_RUNS")
        run_id, path = new_run_dir(None)
        assert path == os.path.join(os.getcwd(), "tritium-runs", run_id)
        assert not os.path.exists("tritium-runs")  # made by the first who writes there

    def test_as_given(self, tmp_path: Path) -> None:
        assert new_run_dir(str(tmp_path))[1] == str(tmp_path)


class TestEvents:
    def test_one_json_object_a_line(self, tmp_path: Path) -> None:
        log = RunLog(str(tmp_path / "run"), {"ranks": 2, "env": {"WANDB_API_KEY": "secret"}})
        values = {"loss": float("nan"), "least": float("-inf"), "rate": np.float32(0.5), "at": np.int64(3)}
        log.event(Logged(rank=1, values=values))
        log.event(GangFormed(peers=({"rank": 0, "host": "Zürich\n", "address": tmp_path},)))
        log.close()
        first, second, third = events(tmp_path / "run")
        assert first["kind"] == "run"
        assert first["settings"] == {"ranks": 2, "env": ["WANDB_API_KEY"]}
        assert {"python", "system", "pyarrow"} <= first["versions"].keys()
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", second.pop("time"))
        assert second == {
            "run": "",
            "kind": "log",
            "rank": 1,
            "values": {"loss": "NaN", "least": "-Infinity", "rate": 0.5, "at": 3},
        }
        assert third["peers"] == [{"rank": 0, "host": "Zürich\n", "address": str(tmp_path)}]
        assert "secret" not in tmp_path.joinpath("run", "events.jsonl").read_text()

    def test_a_second_run_in_the_same_directory_is_appended(self, tmp_path: Path) -> None:
        for _ in range(2):
            RunLog(str(tmp_path), {}).close()
        assert [event["kind"] for event in events(tmp_path)] == ["run", "run"]

    def test_from_many_threads(self, tmp_path: Path) -> None:
        log = RunLog(str(tmp_path), {})
        threads = [
            threading.Thread(target=lambda rank=rank: [log.event(Logged(rank=rank)) for _ in range(50)])
            for rank in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        log.close()
        assert len(events(tmp_path)) == 201

    def test_after_close_nothing_is_written(self, tmp_path: Path) -> None:
        log = RunLog(str(tmp_path), {})
        log.close()
        log.close()
        log.event(Note(text="late"))
        assert len(events(tmp_path)) == 1

    @pytest.mark.skipif(os.geteuid() == 0 and not os.path.exists("/dev/full"), reason="needs a full disk")
    def test_a_full_disk_does_not_end_the_run(self, tmp_path: Path) -> None:
        tmp_path.joinpath("events.jsonl").symlink_to("/dev/full")
        log = RunLog(str(tmp_path), {})
        log.event(Logged(rank=0))
        log.report({"ok": True}, "<p>a page</p>")
        log.close()
        assert log.problem is not None
        assert log.problem.startswith("events.jsonl could not be written any further: [Errno 28]")


class TestOutput:
    def test_a_line_that_the_disk_cuts_short_is_not_there(self, tmp_path: Path) -> None:
        log = RunLog(str(tmp_path), {})
        before = events(tmp_path)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (tmp_path.joinpath("events.jsonl").stat().st_size + 30, hard))
        try:
            log.event(Note(text="x" * 100))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert log.problem is not None
        assert events(tmp_path) == before
        log.close()

    @pytest.mark.parametrize("length", [0, 200_000])
    def test_a_line_that_a_kill_cut_short_does_not_run_into_the_next(self, tmp_path: Path, length: int) -> None:
        RunLog(str(tmp_path), {}).close()
        whole = events(tmp_path)
        with tmp_path.joinpath("events.jsonl").open("a") as file:
            file.write('{"time": "2026-11-22", "ki' + "x" * length)
        RunLog(str(tmp_path), {}).close()
        assert events(tmp_path)[: len(whole)] == whole
        assert [event["kind"] for event in events(tmp_path)[len(whole) :]] == ["run"]

    def test_whole_and_by_rank(self, tmp_path: Path) -> None:
        log = RunLog(str(tmp_path), {})
        log.output(0, "half a ")
        log.output(1, "other\n")
        log.output(0, "line\r\n\ud800 end")
        log.close()
        assert tmp_path.joinpath("logs", "rank-0.log").read_bytes() == b"half a line\r\n\\ud800 end"
        assert tmp_path.joinpath("logs", "rank-1.log").read_text() == "other\n"


def give(log: RunLog, name: str, *chunks: bytes, last: bool = True) -> None:
    """Store a file, or all but its last piece."""
    for piece in cut(name, chunks):
        if last or not piece.last:
            log.store(piece)
    if last:
        log.wait_for_uploads()


@pytest.fixture
def memory() -> Any:
    files = fsspec.filesystem("memory")
    yield files
    files.rm("/", recursive=True)


class TestStoredFiles:
    def test_in_pieces_and_named_when_whole(self, tmp_path: Path) -> None:
        log = RunLog(str(tmp_path), {})
        give(log, "model/weights.bin", b"one ", b"two", last=False)
        assert not tmp_path.joinpath("model", "weights.bin").exists()
        give(log, "model/weights.bin", b"one ", b"two")
        assert tmp_path.joinpath("model", "weights.bin").read_bytes() == b"one two"
        give(log, "model/weights.bin", b"again")
        give(log, "never.bin", b"half", b"", b"more", last=False)
        log.close()
        assert tmp_path.joinpath("model", "weights.bin").read_bytes() == b"again"
        assert sorted(os.listdir(tmp_path)) == ["events.jsonl", "logs", "model", "run.json"]

    @pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", "", "s3://b/x", "C:x"])
    def test_not_outside_the_directory(self, tmp_path: Path, name: str) -> None:
        log = RunLog(str(tmp_path), {})
        with pytest.raises(BadSetting, match="is no name of a file in the run directory"):
            give(log, name, b"")
        log.close()

    @pytest.mark.parametrize("chunks", [[], [b""], [b"", b"a", b""], [b"a" * PIECE, b"b"], [b"abc" * PIECE]])
    def test_chunks_of_any_size(self, tmp_path: Path, chunks: list[bytes]) -> None:
        log = RunLog(str(tmp_path), {})
        give(log, "x", *chunks)
        log.close()
        assert tmp_path.joinpath("x").read_bytes() == b"".join(chunks)

    @pytest.mark.parametrize("content", [b"abc", bytearray(b"abc"), memoryview(b"abc")])
    def test_bytes_are_a_file_themselves(self, content: Any) -> None:
        (piece,) = cut("x", content)
        assert (bytes(piece.body), piece.size) == (b"abc", 3)

    @pytest.mark.parametrize("content", ["abc", ["abc"], [97]])
    def test_what_is_not_bytes_is_refused_by_name(self, content: Any) -> None:
        with pytest.raises(BadSetting, match=r"world\.store\('x', …\) takes bytes, .* got a (str|int): .*encode"):
            list(cut("x", content))

    @pytest.mark.parametrize("url", [False, True], ids=["disk", "fsspec"])
    def test_one_that_was_cut_short_and_is_stored_again_is_whole(self, tmp_path: Path, memory: Any, url: bool) -> None:
        """By the same log: it serves a run with all its attempts."""
        where = "memory://runs/1" if url else str(tmp_path)
        log = RunLog(where, {})
        give(log, "w", b"earlier")
        give(log, "w", b"HALF", b"", b"more", last=False)
        assert fsspec.open(f"{where}/w").open().read() == b"earlier"
        give(log, "w", b"W", b"HOLE")
        assert fsspec.open(f"{where}/w").open().read() == b"WHOLE"
        log.close()
        assert not [name for name in fsspec.open(where).fs.find(where) if "part" in name]

    def test_a_transaction_of_the_users_does_not_hold_a_file_back(self, memory: Any) -> None:
        with memory.transaction:
            log = RunLog("memory://runs/1", {})
            give(log, "w", b"whole")
            assert memory.cat_file("/runs/1/w") == b"whole"
            log.close()
            assert memory.exists("/runs/1/events.jsonl")

    @pytest.mark.parametrize("url", [False, True], ids=["disk", "fsspec"])
    def test_what_is_half_there_is_removed_when_its_attempt_ends(self, tmp_path: Path, memory: Any, url: bool) -> None:
        where = "memory://runs/1" if url else str(tmp_path)
        log = RunLog(where, {})
        give(log, "w", b"HALF", b"more", last=False)
        log.drop_partial()
        files, root = fsspec.core.url_to_fs(where)
        assert not [name for name in files.find(root) if "/w" in name]
        log.close()

    def test_pieces_that_are_not_of_one_file_are_refused(self, tmp_path: Path) -> None:
        log = RunLog(str(tmp_path), {})
        one, two = [list(cut("w", [letter * PIECE] * 3)) for letter in (b"a", b"b")]
        for pieces in ([one[0], one[2]], [one[1]], [one[0], two[1], two[2]], [one[0], one[1], replace(one[2], size=1)]):
            for piece in pieces[:-1]:
                log.store(piece)
            with pytest.raises(StoreFailed, match="its pieces are not those of one file") as caught:
                log.store(pieces[-1])
            assert caught.value.path == str(tmp_path / "w")
        log.close()
        assert sorted(os.listdir(tmp_path)) == ["events.jsonl", "logs", "run.json"]

    @pytest.mark.parametrize("url", [False, True], ids=["disk", "fsspec"])
    def test_a_name_is_one_however_it_is_written(self, tmp_path: Path, memory: Any, url: bool) -> None:
        where = "memory://runs/1" if url else str(tmp_path)
        log = RunLog(where, {})
        for name, content in (("a/w", b"first"), ("./a/w", b"second"), ("a//./w", b"third")):
            give(log, name, content)
        log.close()
        files, root = fsspec.core.url_to_fs(where)
        assert {name.removeprefix(root): files.cat_file(name) for name in files.find(root) if name[-2:] == "/w"} == {
            "/a/w": b"third"
        }

    def test_what_an_object_store_refuses_is_told_with_its_name(
        self, memory: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        log = RunLog("memory://runs/1", {})

        def refuse(*_: Any, **__: Any) -> None:
            raise RuntimeError("SlowDown: reduce your request rate")

        give(log, "w", b"earlier")
        monkeypatch.setattr(type(memory), "mv", refuse)
        with pytest.raises(StoreFailed) as caught:
            give(log, "w", b"new")
        assert str(caught.value).startswith(
            "memory://runs/1/w could not be stored: RuntimeError: SlowDown: reduce your request rate. 0 bytes of it "
            "were written, 3 more are needed"
        )
        assert memory.cat("/runs/1/w") == b"earlier"
        log.close()

    @pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a full disk")
    def test_a_disk_of_this_machine_that_is_full_is_not_the_object_stores(
        self, memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: Any) -> tuple[int, str]:
            return os.open("/dev/full", os.O_WRONLY), str(tmp_path / "joined.part")

        log = RunLog("memory://runs/1", {})
        monkeypatch.setattr(tempfile, "mkstemp", full)
        with pytest.raises(StoreFailed) as caught:
            give(log, "w", b"new")
        folder = tempfile.gettempdir()
        assert str(caught.value).startswith(
            f"memory://runs/1/w could not be stored: No space left on device in {folder}, where it is collected on "
            "this machine before its upload."
        )
        assert f"{caught.value.free:,} bytes are free there." in str(caught.value)
        assert str(caught.value).endswith("Free space there, or start this process with another TMPDIR.")
        log.close()


class TestARemoteDirectory:
    @pytest.fixture
    def files(self, memory: Any) -> Any:
        return memory

    def test_is_written_through_fsspec(self, files: Any) -> None:
        for number in range(2):
            log = RunLog("memory://bucket/run", {"ranks": 1})
            log.event(Note(text=f"{number}"))
            log.output(0, f"hello {number}\n")
            give(log, "weights/w.bin", b"12", b"34")
            give(log, "half.bin", b"12", b"34", last=False)
            log.report({"ok": True}, "<p>a page</p>")
            log.close()
            assert log.problem is None
        found = {name: files.cat(name) for name in files.find("/bucket/run")}
        assert sorted(found) == [
            "/bucket/run/events.jsonl",
            "/bucket/run/logs/rank-0.log",
            "/bucket/run/report.html",
            "/bucket/run/report.json",
            "/bucket/run/run.json",
            "/bucket/run/weights/w.bin",
        ]
        assert found["/bucket/run/weights/w.bin"] == b"1234"
        assert found["/bucket/run/logs/rank-0.log"] == b"hello 0\nhello 1\n"
        assert len(found["/bucket/run/events.jsonl"].splitlines()) == 4

    def test_signs_of_patterns_in_its_name_stand_for_themselves(self, files: Any) -> None:
        files.pipe_file("/bucket/lr0/events.jsonl", b"another's\n")
        for number in range(2):
            log = RunLog("memory://bucket/lr[0.1]", {})
            log.output(0, f"hello {number}\n")
            log.close()
            assert log.problem is None
        assert len(files.cat_file("/bucket/lr[0.1]/events.jsonl").splitlines()) == 2
        assert files.cat_file("/bucket/lr[0.1]/logs/rank-0.log") == b"hello 0\nhello 1\n"

    def test_that_can_not_be_read_leaves_nothing_here(self, files: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: Any, **__: Any) -> None:
            raise PermissionError("denied")

        before = set(os.listdir(tempfile.gettempdir()))
        RunLog("memory://bucket/run", {}).close()
        monkeypatch.setattr(type(files), "get_file", refuse)
        with pytest.raises(PermissionError, match="denied"):
            RunLog("memory://bucket/run", {})
        assert set(os.listdir(tempfile.gettempdir())) == before

    def test_that_refuses_leaves_the_local_copy(self, files: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        log = RunLog("memory://bucket/run", {})

        def refuse(*_: Any) -> None:
            raise PermissionError("denied")

        monkeypatch.setattr(type(files), "put_file", refuse)
        log.close()
        assert log.problem is not None
        place = Path(log.problem.rpartition("It is kept in ")[2].rstrip("."))
        assert place.joinpath("events.jsonl").exists()
        for path in (place / "events.jsonl", place / "logs", place):
            path.unlink() if path.is_file() else path.rmdir()


class TestReport:
    def test_what_came_of_a_run(self, tmp_path: Path) -> None:
        report = Report("id", str(tmp_path), {"ranks": 2, "env": {"KEY": "secret"}})
        report.event(Note(text="waiting for slots"))
        report.event(GangFormed(peers=[{"rank": rank, "host": f"b{rank}", "pid": 70 + rank} for rank in (0, 1)]))
        for rank in (0, 1):
            report.event(RowsCounted(name="train", rank=rank, rows=10 + rank, ended=True))
            for epoch in range(3):
                report.event(
                    EpochCounted(rank=rank, name="train", epoch=epoch, rows=10 + rank, used=10 + rank, padded=1)
                )
        report.event(Logged(rank=0, step=4, values={"loss": 0.5}))
        report.event(Logged(rank=0, step=5, values={"loss": 0.25}))
        report.event(FileStored(name="model/w.bin"))
        report.event(Waiting(text="not of the report"))
        parts = [[0, 15, "0000000000000001"], [1, 6, "0000000000000005"]]
        report.event(RowsReceived(rows={"train": [10, 11]}, fingerprint={"train": parts}))
        report.event(RunEnded(ok=True, seconds=12.5))
        built = json.loads(json.dumps(report.build()))
        assert built["ok"] is True
        assert built["seconds"] == 12.5
        assert built["settings"] == {"ranks": 2, "env": ["KEY"]}
        assert built["seconds_until"].keys() == {"formed", "spooled", "first_log"}
        assert built["notes"] == ["waiting for slots"]
        assert built["stored"] == ["model/w.bin"]
        assert built["failure"] is None
        assert built["fingerprint"] == {"train": {"0": [15, "0000000000000001"], "1": [6, "0000000000000005"]}}
        assert built["ranks"][1] == {
            "rank": 1,
            "host": "b1",
            "pid": 71,
            "shards": {"train": {"rows": 11, "used": 33, "padded": 3, "dropped": 0, "repeated": 0}},
        }
        assert built["ranks"][0]["logged"] == {"step": 5, "loss": 0.25}

    def test_of_a_retry_with_fewer_ranks(self) -> None:
        """Ranks and times are those of the last attempt."""
        report = Report("f3", "/tmp/run", {})
        report.event(GangFormed(peers=[{"rank": rank, "host": "b7"} for rank in range(3)]))
        for rank in range(3):
            report.event(RowsCounted(name="train", rank=rank, rows=10, ended=True))
        report.event(GangRetried(number=1, of=2, start=None, reason="rank 2 was lost"))
        assert report.build()["seconds_until"] == {}
        report.event(GangFormed(peers=[{"rank": rank, "host": "b9"} for rank in range(2)]))
        report.event(RowsCounted(name="train", rank=0, rows=15, ended=True))
        assert report.build()["seconds_until"].keys() == {"formed"}
        report.event(RowsCounted(name="train", rank=1, rows=15, ended=True))
        built = report.build()
        assert built["seconds_until"].keys() == {"formed", "spooled"}
        assert [(rank["rank"], rank["host"]) for rank in built["ranks"]] == [(0, "b9"), (1, "b9")]

    @pytest.mark.parametrize("kind", ["retry", "started"])
    def test_what_ranks_said_before_a_retry_is_not_counted_with_what_they_say_after_it(self, kind: str) -> None:
        report = Report("f3", "/tmp/run", {})
        told = {"seconds": {"forward": 1.0}, "arrive": 0.0}
        report.event(GangFormed(peers=[{"rank": rank, "host": "b7"} for rank in range(3)]))
        for rank in range(3):
            report.event(StepsTraced(rank=rank, **told))
            report.event(EpochCounted(rank=rank, name="train", used=10))
            report.event(Logged(rank=rank, step=7, values={"loss": 0.5}))
        assert report.build()["verdict"] is not None
        report.event(ANOTHER_ATTEMPT[kind])
        assert report.build()["verdict"] is None
        report.event(GangFormed(peers=[{"rank": 0, "host": "b9"}]))
        report.event(EpochCounted(rank=0, name="train", used=10))
        built = report.build()
        assert built["verdict"] is None
        (rank,) = built["ranks"]
        assert rank["shards"]["train"]["used"] == 10
        assert rank.keys() == {"rank", "host", "shards"}

    def test_the_first_failure(self) -> None:
        report = Report("id", "/tmp/run", {})
        report.event(GangFailed(how="exception", rank=1, host="b7", type="ValueError", text="no"))
        report.event(GangFailed(how="exception", rank=0, host="b7", type="OSError", text="broken pipe"))
        report.event(RunEnded(ok=False, seconds=1.5))
        built = report.build()
        assert built["failure"].items() >= {"rank": 1, "host": "b7", "type": "ValueError", "text": "no"}.items()
        assert built["seconds"] == 1.5

    def test_is_written_whole(self, tmp_path: Path) -> None:
        log = RunLog(str(tmp_path), {})
        log.report({"loss": float("inf"), "ranks": np.arange(2)}, "<p>a page</p>")
        log.close()
        assert json.loads(tmp_path.joinpath("report.json").read_text()) == {"loss": "Infinity", "ranks": [0, 1]}
        assert tmp_path.joinpath("report.html").read_text() == "<p>a page</p>"
        assert not list(tmp_path.glob("*.part"))
