"""Whatever happens to a save, an earlier checkpoint is loaded, and what is loaded was saved."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import object_stores
import tritium as tr
from tritium.checkpoint.format import own
from tritium.checkpoint.state import Snapshot
from tritium.checkpoint.store import Store
from tritium.errors import RankFailed

PROGRAM = Path(__file__).with_name("saving.py")
ROUNDS = int(os.environ.get("TRITIUM_FAULT_KILLS", "10"))  # `make faults` asks for 50


def program(*arguments: str, before: tuple[str, ...] = (), **env: str) -> Any:
    """Run one of the programs. Return its findings from JSON."""
    command = [*before, sys.executable, str(PROGRAM), *arguments]
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, check=False, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("seed", ["1"])
def test_killed_at_any_moment(seed: str, tmp_path: Path) -> None:
    found = program("kill", str(tmp_path), str(ROUNDS), seed)
    assert found["saved"] > 0
    assert found["partial"] > 0, "some kills must have hit a save"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_killed_while_its_gang_saves(rank: int, tmp_path: Path) -> None:
    def train(dies: bool) -> int:
        world = tr.world()
        found = world.checkpoint.load()
        start = 0 if found is None else found.step
        if found is not None:
            assert (found["weight"] == found.step).all()
            assert [mine["weight"][0] for mine in found.own] == [found.step] * 2
        for step in range(start + 1, start + 4):
            weight = np.full(500_000, step, np.float32)
            world.checkpoint.save({"weight": weight}, step, own={"weight": weight})
        if dies and world.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)  # while the third is written
        return start

    def launch(dies: bool) -> list[int]:
        quiet: dict[str, Any] = {"progress": False, "output": "none", "retries": 0}
        return tr.launch(train, ranks=2, on="driver", args=(dies,), run_dir=str(tmp_path), **quiet)

    reached = 0
    for _ in range(max(2, ROUNDS // 10)):
        with pytest.raises(RankFailed, match="SIGKILL"):
            launch(dies=True)
        (start,) = set(launch(dies=False))
        assert start - reached in (2, 3)
        reached = start + 3


def put(store: Store, step: int) -> None:
    """Save two ranks' checkpoint of a step."""
    name = store.prepare(step)
    state = {"weight": np.full(500, step, np.float32), "step": step}
    sums = store.write(name, "replicated", Snapshot().take(state, "state"))
    for rank in range(2):
        sums |= store.write(name, own(rank), Snapshot().take({"random": np.arange(30), "rank": rank}, "own"))
    store.commit(name, 2, sums)


FILES = [f"{part}.{kind}" for part in ("replicated", "own-0", "own-1") for kind in ("json", "safetensors")]


@pytest.mark.parametrize("file", [*FILES, "manifest.json"])
def test_every_file_cut_short_or_changed_in_one_bit(file: str, tmp_path: Path) -> None:
    chance = random.Random(file)
    for step in (1, 2):
        put(Store(str(tmp_path / "good")), step)
    good = tmp_path.joinpath("good", "checkpoints", "000000000002", file).read_bytes()
    cuts = [good[:at] for at in (0, len(good) - 1, *(chance.randrange(len(good)) for _ in range(5)))]
    flips = []
    for _ in range(15):
        flipped = bytearray(good)
        flipped[chance.randrange(len(good))] ^= 1 << chance.randrange(8)
        flips.append(bytes(flipped))
    for number, bad in enumerate([*cuts, *flips, good + b"x", None]):
        run_dir = tmp_path / str(number)
        shutil.copytree(tmp_path / "good", run_dir)
        where = run_dir / "checkpoints" / "000000000002" / file
        if bad is None:
            where.unlink()
        else:
            where.write_bytes(bad)
        loaded, reasons = Store(str(run_dir)).newest()
        assert loaded is not None
        assert (loaded.step, loaded["step"]) == (1, 1)
        assert len(reasons) == 1
        assert file in reasons[0], reasons
        assert str(run_dir / "checkpoints" / "000000000002") in reasons[0]
        shutil.rmtree(run_dir)


def test_none_that_is_whole(tmp_path: Path) -> None:
    for step in (1, 2):
        put(Store(str(tmp_path)), step)
    for name in Store(str(tmp_path)).names():
        tmp_path.joinpath("checkpoints", name, "own-0.json").unlink()
    loaded, reasons = Store(str(tmp_path)).newest()
    assert loaded is None
    assert len(reasons) == 2
    assert all("own-0.json of the checkpoint" in reason and "is missing" in reason for reason in reasons)


def on_a_disk_of(size: str, folder: Path) -> tuple[str, ...]:
    """Return the beginning of a command that has a disk of this size at `folder`; skip the test where there is none."""
    space = ("unshare", "--user", "--map-root-user", "--mount")
    if shutil.which("unshare") is None or subprocess.run([*space, "true"], check=False).returncode:
        pytest.skip("no user namespaces here, so no file system of a chosen size")
    return (*space, "sh", "-c", f'mount -t tmpfs -o size={size} tmpfs {folder} && exec "$@"', "sh")


def test_a_full_disk_under_the_spool(tmp_path: Path) -> None:
    disk, runs = tmp_path / "disk", tmp_path / "runs"
    disk.mkdir()
    before = on_a_disk_of("4m", disk)
    found = program("full_spool", str(disk), before=before, SPARK_LOCAL_DIRS=str(disk), RUNS=f"{runs}/")
    for shuffle in ("full", "stream"):
        error = found[shuffle]
        assert (error["directory"], error["left"]) == (str(disk), [0, []]), "nothing is left on the disk"
        assert 0 < error["written"] <= 4 << 20
        assert error["needed"] > 0
        assert re.match(
            rf"the spool in {disk} on \S+ can't grow: No space left on device\. [\d.]+ [KM]iB are written "
            r"\([\d,]+ rows; each takes some 72 bytes\), [\d.]+ [KM]iB more are needed now, [\d.]+ \S+ of 4\.0 MiB are "
            "free there",
            error["text"],
        ), error["text"]
        assert "Point spark.local.dir (or SPARK_LOCAL_DIRS) at a larger disk" in error["text"]
        report = json.loads(runs.joinpath(shuffle, "report.json").read_text())
        assert report["retries"] == [], "the same rows would fill the same disk again"
    assert found["after"] == [500, 500]


def test_a_full_disk_and_a_read_only_one(tmp_path: Path) -> None:
    found = program("full", str(tmp_path), before=on_a_disk_of("2500k", tmp_path))
    assert found["path"] == f"{tmp_path}/checkpoints/000000000003"
    assert found["needed"] > 800_000
    assert 0 < found["written"] < found["needed"]
    assert found["free"] < found["needed"]
    assert found["there"] == ["000000000001", "000000000002"]
    assert found["text"].startswith("Rank 0 on ")
    assert "could not be written (replicated): No space left on device." in found["text"]
    assert f"{found['needed']:,} bytes are needed, {found['written']:,} were written" in found["text"]
    assert "Earlier checkpoints are intact, the newest of step 2. Free space there" in found["text"]
    assert "Read-only file system" in found["read-only"]
    assert "Choose a run_dir that can be written to." in found["read-only"]


def test_a_full_disk_under_the_run_directory(tmp_path: Path) -> None:
    """A file that a rank stores is an error with its name; the log of events is not worth a training."""
    found = program("full_run_dir", str(tmp_path), before=on_a_disk_of("4m", tmp_path))
    error = found["error"]
    assert (error["rank"], error["path"]) == (1, f"{tmp_path}/weights.bin")
    assert error["written"] >= 1 << 20
    assert error["free"] < 1 << 20
    assert re.match(
        rf"{tmp_path}/weights\.bin could not be stored: No space left on device\. [\d,]+ bytes of it were written, "
        r"1,048,576 more are needed now\. [\d,]+ bytes are free there\. Nothing of it is left\. Free space there, or",
        error["text"],
    ), error["text"]
    assert found["left"] == {"weights.bin": 1 << 20}, "the earlier one is as it was"
    assert found["logged"] == [7, 7]
    (said,) = found["said"]
    assert said.startswith("The run directory is not complete: events.jsonl could not be written any further")


@pytest.fixture
def server() -> Iterator[str]:
    """Yield the address of a real S3 server."""
    with object_stores.server() as address:
        yield address


def test_a_file_that_a_killed_rank_stored_by_half_is_whole_on_an_object_store(server: str) -> None:
    found = program("object_store_run", "s3://bucket/runs/2", **object_stores.bucket(server))
    assert found == {"retries": 1, "whole": True, "left": []}


def test_an_object_store_without_rename(server: str) -> None:
    env = object_stores.bucket(server)
    found = program("object_store", "s3://bucket/runs/1", **env)
    assert found["first"] == [0, 0]
    assert found["names"] == ["000000000003", "000000000002"]
    assert found["second"] == [2, 2]
    assert found["third"] == [3, 3]
    assert found["left"] == ["000000000003-2", "000000000004"]
    assert found["last"] == 4
    assert found["fitted"] == [2, 901], "not as many bytes as an earlier listing says"
    _, second, third = found["notes"]
    assert "own-1.safetensors of the checkpoint s3://bucket/runs/1/checkpoints/000000000003 has " in second[0]
    assert "000000000004 was never completed" in third[0]
