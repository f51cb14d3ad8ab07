"""The spool: what was appended is what is mapped, no file is left, and memory stays flat."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tritium.data.schema import Field
from tritium.data.spool import Ragged, RaggedView, Spool, SpoolReader, scratch_directory
from tritium.errors import BadSetting, DataError, SpoolFull


def field(name: str, kind: Any = "fixed", dtype: str = "float32", shape: Any = (), mask: bool = False) -> Field:
    return Field(name=name, sources=(name,), kind=kind, dtype=dtype, shape=shape, nulls=("mask",) if mask else (None,))


FIELDS = (
    field("x", shape=None),
    field("m", dtype="int16", shape=(2, 2)),
    field("y", dtype="int64", mask=True),
    field("r", "bytes", "float64", None),
    field("b", "bytes", "uint8", None),
)


def rows_of(start: int, lengths: Sequence[int]) -> tuple[np.ndarray, dict[str, Any]]:
    n, total = len(lengths), sum(lengths)
    ids = np.arange(start, start + n)
    return ids, {
        "x": np.arange(n * 3, dtype="f4").reshape(n, 3) + start,
        "m": np.arange(n * 4, dtype="i2").reshape(n, 2, 2) + start,
        "y": ids * 10,
        "y_mask": ids % 2 == 0,
        "r": Ragged(np.arange(total, dtype="f8") + start, np.array(lengths, np.int64)),
        "b": Ragged(np.arange(total, dtype=np.uint8), np.array(lengths, np.int64)),
    }


@contextmanager
def spool_of(fields: Sequence[Field], directory: str | None = None) -> Iterator[Spool]:
    spool = Spool(fields, directory)
    try:
        yield spool
    finally:
        spool.close()


@given(
    segments=st.lists(st.lists(st.lists(st.integers(0, 4), max_size=5), max_size=3), max_size=4),
    data=st.data(),
)
@settings(max_examples=60)
def test_what_was_committed_is_what_is_mapped(segments: list[list[list[int]]], data: st.DataObject) -> None:
    with spool_of(FIELDS) as spool:
        written: list[tuple[np.ndarray, dict[str, Any]]] = []
        count = 0
        reader, views = None, []
        for segment in segments:
            for lengths in segment:
                written.append(rows_of(count, lengths))
                spool.append(*written[-1])
                count += len(lengths)
                assert spool.rows <= count
            assert spool.commit() == count == spool.rows
            if count and reader is None:
                reader = SpoolReader(json.loads(json.dumps(spool.describe())), 0)
            if reader:
                reader.extend(count)
                views.append((reader.column("x"), count))
        if reader is None:
            return
        assert reader.names == ("x", "m", "y", "y_mask", "r", "b")
        assert np.array_equal(reader.ids, np.arange(count))
        for name in ("x", "m", "y", "y_mask"):
            column = reader.column(name)
            assert isinstance(column, np.ndarray)
            assert not column.flags.writeable
            assert np.array_equal(column, np.concatenate([columns[name] for _, columns in written]))
        index = np.array(data.draw(st.lists(st.integers(0, count - 1), max_size=6)), np.int64)
        for name in ("r", "b"):
            view = reader.column(name)
            assert isinstance(view, RaggedView)
            assert len(view) == count
            expected = [row for _, columns in written for row in columns[name].rows()]
            taken = view.take(index)
            assert len(taken) == len(index)
            for row, at in zip(taken.rows(), index, strict=True):
                assert np.array_equal(row, expected[at])
        final = np.concatenate([columns["x"] for _, columns in written])
        for view, rows in views:  # an earlier view stays what it was
            assert np.array_equal(view, final[:rows])
        reader.close()


def test_rows_do_not_count_before_they_are_committed() -> None:
    with spool_of(FIELDS) as spool:
        spool.append(*rows_of(0, [1, 2]))
        assert spool.rows == 0
        assert spool.commit() == 2
        spool.append(*rows_of(2, [1]))
        assert spool.rows == 2
        assert SpoolReader(spool.describe(), spool.rows).ids.tolist() == [0, 1]


def test_a_rank_process_maps_the_inherited_files_after_the_supervisor_has_closed_them(tmp_path: Path) -> None:
    code = (
        "import json, sys\n"
        "from tritium.data.spool import SpoolReader\n"
        "print('started', flush=True)\n"
        "reader = SpoolReader(json.loads(sys.stdin.readline()), int(sys.stdin.readline()))\n"
        "print(int(reader.column('y').sum()), reader.column('x').shape, len(reader.column('b')))\n"
    )
    with spool_of(FIELDS, str(tmp_path)) as spool:
        child = subprocess.Popen(
            [sys.executable, "-c", code], pass_fds=spool.fds, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        with child:
            assert child.stdout is not None
            assert child.stdout.readline() == "started\n"
            spool.append(*rows_of(0, [3, 0, 1]))
            spool.commit()
            assert list(tmp_path.iterdir()) == [], "the files have no name"
            description = json.dumps(spool.describe())
            spool.close()
            out, _ = child.communicate(f"{description}\n{3}\n")
    assert out == "30 (3, 3) 3\n"


def test_descriptors_are_not_inherited_by_chance() -> None:
    with spool_of(FIELDS) as spool:
        assert len(spool.fds) == len(set(spool.fds)) == 9  # ids, x, m, y and its mask, two each of r and b
        assert not any(os.get_inheritable(fd) for fd in spool.fds)


def test_without_nameless_files_the_name_is_removed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    with spool_of(FIELDS, str(tmp_path)) as spool:
        assert list(tmp_path.iterdir()) == []
        spool.append(*rows_of(0, [2]))
        assert SpoolReader(spool.describe(), spool.commit()).ids.tolist() == [0]


@contextmanager
def limit(kind: int, value: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


def test_a_full_disk_is_named_with_its_numbers(tmp_path: Path) -> None:
    """A file size limit stands in for the disk: the system call fails in the same place."""
    rows = np.zeros((1000, 300), "f4")
    with spool_of((field("x", shape=(300,)),), str(tmp_path)) as spool, limit(resource.RLIMIT_FSIZE, 2_000_000):
        spool.append(np.arange(1000), {"x": rows})
        with pytest.raises(SpoolFull, match=r"can't grow.*1\.9 MiB are written.*spark.local.dir") as caught:
            spool.append(np.arange(1000), {"x": rows})
    assert caught.value.directory == str(tmp_path)
    assert caught.value.written == 2_016_000  # 2000 ids of 8 bytes, and rows up to the limit
    assert caught.value.needed == 400_000
    assert str(tmp_path) in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)


def test_more_columns_than_open_files_says_pack_them() -> None:
    fields = [field(f"c{i}") for i in range(200)]
    opened = len(os.listdir("/proc/self/fd"))
    with limit(resource.RLIMIT_NOFILE, opened + 50), pytest.raises(BadSetting, match="pack scalars"):
        Spool(fields)
    assert len(os.listdir("/proc/self/fd")) == opened


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({}, "'x' is missing"),
        ({"x": np.zeros(2, "f4")}, "3 rows of fixed float32, and was given 2 of fixed float32"),
        ({"x": np.zeros(3, "f8")}, "given 3 of fixed float64"),
        ({"x": Ragged(np.zeros(3, "f4"), np.ones(3, np.int64))}, "given 3 of ragged float32"),
        ({"x": np.zeros((3, 2), "f4")}, r"rows of shape \(\) and now one of \(2,\)"),
    ],
)
def test_rows_that_do_not_fit_are_refused(columns: dict[str, Any], message: str) -> None:
    with spool_of([field("x")]) as spool, pytest.raises(DataError, match=message):
        spool.append(np.arange(3), columns)


def test_the_shape_of_the_first_row_holds_for_the_rest() -> None:
    with spool_of([field("x", shape=None)]) as spool:
        assert spool.describe()[1]["shape"] is None
        spool.append(np.arange(0), {"x": np.zeros((0, 7), "f4")})
        assert spool.describe()[1]["shape"] is None
        spool.append(np.arange(2), {"x": np.zeros((2, 3), "f4")})
        assert spool.describe()[1]["shape"] == [3]
        with pytest.raises(DataError, match=r"\(3,\) and now one of \(4,\)"):
            spool.append(np.arange(2), {"x": np.zeros((2, 4), "f4")})


def test_an_empty_spool_maps_to_nothing() -> None:
    with spool_of(FIELDS) as spool:
        reader = SpoolReader(spool.describe(), 0)
        assert len(reader.ids) == len(reader.column("x")) == len(reader.column("b")) == 0


def test_scratch_is_where_the_cluster_manager_put_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SPARK_LOCAL_DIRS", "LOCAL_DIRS", "SPARK_EXECUTOR_DIRS"):
        monkeypatch.delenv(name, raising=False)
    default = scratch_directory()
    assert os.path.isdir(default)
    (tmp_path / "executor").mkdir()
    (tmp_path / "yarn").mkdir()
    monkeypatch.setenv("SPARK_EXECUTOR_DIRS", str(tmp_path / "executor"))
    assert scratch_directory() == str(tmp_path / "executor")
    monkeypatch.setenv("LOCAL_DIRS", f"{tmp_path / 'missing'},{tmp_path / 'yarn'}")
    assert scratch_directory() == str(tmp_path / "yarn")
    monkeypatch.setenv("SPARK_LOCAL_DIRS", "/dev/shm," + str(tmp_path) if os.path.isdir("/dev/shm") else str(tmp_path))
    free = {path: os.statvfs(path).f_bavail * os.statvfs(path).f_frsize for path in ("/dev/shm", str(tmp_path))}
    assert scratch_directory() == max(free, key=lambda path: free[path])


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="counts private memory as Linux does")
def test_writing_and_reading_a_shard_needs_no_private_memory(tmp_path: Path) -> None:
    """200 MB through a spool and back, in a process of its own: private memory grows by less than 15 MB."""
    code = f"""
import numpy as np
from tritium.data.schema import Field
from tritium.data.shard import Shard
from tritium.data.spool import Spool

def private():
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) // 1024

field = Field(name="x", sources=("x",), kind="fixed", dtype="float32", shape=(64,))
spool = Spool([field], {str(tmp_path)!r})
part = np.ones((10_000, 64), "f4")
def write(start):
    spool.append(np.arange(start, start + 10_000), {{"x": part}})
    spool.commit()
def read():
    for epoch in Shard.of("train", spool, [field]).epochs(1, batch_size=1024):
        for batch in epoch:
            batch["x"].sum()
write(0)
read()
before = private()
for start in range(10_000, 800_000, 10_000):
    write(start)
read()
print(private() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 15
