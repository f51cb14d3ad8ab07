"""A run directory's URL may hold keys: they appear neither in `ps` nor in what a run writes or prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import pytest

import tritium as tr
from tritium.errors import RankFailed, TritiumError, masked

RUN_DIR = "memory://AKIA:hidden@bucket/runs/1"


@pytest.fixture(autouse=True)
def _forget() -> Any:
    yield
    files = fsspec.filesystem("memory")
    if files.exists("/AKIA:hidden@bucket"):
        files.rm("/AKIA:hidden@bucket", recursive=True)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("in s3://AKIA:hid+den@bucket/runs, and", "in s3://***@bucket/runs, and"),
        ('"abfs://container@account.dfs.core.windows.net/x"', '"abfs://container@account.dfs.core.windows.net/x"'),
        ("hdfs://namenode:8020/user/me@home", "hdfs://namenode:8020/user/me@home"),
        ("https://host/a?sig=abc%2F&sv=2", "https://host/a?sig=***&sv=2"),
        ("https://host/a?X-Amz-Security-Token=abc&X-Amz-Signature=def", None),
        ("simplecache::ftp://me:hidden@host/x", "simplecache::ftp://***@host/x"),
        ("no URL, a:b@c and key=value", "no URL, a:b@c and key=value"),
    ],
)
def test_what_is_masked(text: str, shown: str | None) -> None:
    assert masked(text) == shown if shown else "abc" not in masked(text)
    assert str(TritiumError(text)) == masked(text)


@pytest.mark.processes
def test_the_command_line_of_a_rank_shows_none() -> None:
    def look() -> tuple[str, str]:
        return Path("/proc/self/cmdline").read_text(), tr.world()._control.run_dir

    ((line, run_dir),) = tr.launch(look, ranks=1, on="driver", run_dir=RUN_DIR, progress=False)
    assert "hidden" not in line
    assert run_dir == RUN_DIR  # and yet it knows the place


@pytest.mark.processes
def test_nothing_that_a_failed_run_says_or_writes_shows_one(capfd: pytest.CaptureFixture[str]) -> None:
    def train() -> None:
        raise ValueError("no more bikes")

    with pytest.raises(RankFailed) as caught:
        tr.launch(train, ranks=1, on="driver", run_dir=RUN_DIR)
    assert caught.value.run_dir == RUN_DIR
    assert "Logs and events of the whole run: memory://***@bucket/runs/1" in str(caught.value)
    files = fsspec.filesystem("memory")
    written = {path: files.cat(path).decode() for path in files.find("/AKIA:hidden@bucket")}
    assert {"events.jsonl", "report.json"} <= {path.rpartition("/")[2] for path in written}
    assert not [path for path, text in written.items() if "hidden" in text]
    assert "hidden" not in "".join(capfd.readouterr())
