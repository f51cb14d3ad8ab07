"""A launch on Spark where one kind of cluster is enough: slots, cancellation, large results, other Pythons, GPUs."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import random
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import venv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest

import tritium as tr
from clusters import COMMON, wait
from tritium.errors import (
    BadFunction,
    BadSetting,
    JobFailed,
    NotEnoughSlots,
    StartTimeout,
    WireError,
    WrongVersion,
)
from tritium.gang.driver.certificate import new_certificate
from tritium.wire import Channel
from wheels import wheel


def launch(spark: Any, fn: Callable[[], Any], **settings: Any) -> list[Any]:
    quiet = {"ranks": 2, "progress": False, "output": "none", "start_timeout": 120, "retries": 0}
    return tr.launch(fn, spark=spark, **{**quiet, **settings})


class Background:
    """A launch in a thread; `join` returns its results or raises its error."""

    def __init__(self, spark: Any, fn: Callable[[], Any], **settings: Any) -> None:
        self._outcome: list[Any] = []

        def run() -> None:
            try:
                self._outcome.append(launch(spark, fn, **settings))
            except BaseException as error:  # noqa: BLE001 - raised again in join
                self._outcome.append(error)

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def join(self, seconds: float = 60) -> list[Any]:
        self._thread.join(seconds)
        (outcome,) = self._outcome
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


def notes(folder: Path) -> str:
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return "\n".join(line["text"] for line in lines if line["kind"] == "note")


class TestSlots:
    def test_too_few_are_an_error_before_anything_is_submitted(self, spark: Any) -> None:
        jobs = len(spark.sparkContext.statusTracker().getJobIdsForGroup())
        with pytest.raises(
            NotEnoughSlots, match=r"3 ranks need 3 slots at once.* has 2\. Ask for ranks=2, or"
        ) as error:
            launch(spark, lambda: None, ranks=3)
        assert (error.value.needed, error.value.available) == (3, 2)
        assert len(spark.sparkContext.statusTracker().getJobIdsForGroup()) == jobs

    def test_gpus_that_there_are_not(self, spark: Any) -> None:
        with pytest.raises(NotEnoughSlots, match=r"A gang never falls back to CPUs"):
            launch(spark, lambda: None, gpus=1)

    def test_two_launches_at_once_run_side_by_side_when_slots_suffice(self, spark: Any, tmp_path: Path) -> None:
        def meet(mine: str, other: str) -> Callable[[], str]:
            def train() -> str:
                Path(tmp_path, mine).touch()
                wait(Path(tmp_path, other).exists, "the other launch runs at the same time", 120)
                return mine

            return train

        first = Background(spark, meet("a", "b"), ranks=1)
        second = Background(spark, meet("b", "a"), ranks=1)
        assert (first.join(), second.join()) == (["a"], ["b"])

    def test_the_second_waits_visibly_when_they_dont(self, spark: Any, tmp_path: Path) -> None:
        def first() -> str:
            Path(tmp_path, "runs").touch()
            wait(Path(tmp_path, "go").exists, "the second launch has said that it waits", 120)
            return "first"

        running = Background(spark, first)
        wait(Path(tmp_path, "runs").exists, "the first launch runs", 120)
        waiting = Background(spark, lambda: "second", run_dir=str(tmp_path / "second"))
        events = tmp_path / "second/events.jsonl"
        wait(lambda: events.exists() and "waiting for slots" in notes(tmp_path / "second"), "the second waits", 120)
        Path(tmp_path, "go").touch()
        assert (running.join(), waiting.join()) == (["first"] * 2, ["second"] * 2)

    def test_the_second_fails_by_start_timeout_and_the_first_goes_on(self, spark: Any, tmp_path: Path) -> None:
        def first() -> str:
            Path(tmp_path, "runs").touch()
            wait(Path(tmp_path, "go").exists, "the second launch has given up", 120)
            return "first"

        running = Background(spark, first)
        wait(Path(tmp_path, "runs").exists, "the first launch runs", 120)
        with pytest.raises(StartTimeout, match=r"2 needed, 2 in all.*start_timeout=0\.5 s"):
            launch(spark, lambda: None, start_timeout=0.5)
        Path(tmp_path, "go").touch()
        assert running.join() == ["first"] * 2

    def test_slots_that_another_job_holds_end_the_wait_by_start_timeout(self, spark: Any, tmp_path: Path) -> None:
        """Spark itself waits: not one rank may be left half started."""

        def hold(batches: Iterator[Any]) -> Iterator[Any]:
            Path(tmp_path, "held").touch()
            while not Path(tmp_path, "go").exists():
                time.sleep(0.05)
            yield from batches

        job = threading.Thread(target=spark.range(0, 1, 1, 1).mapInArrow(hold, "id long").collect)
        job.start()
        wait(Path(tmp_path, "held").exists, "the other job holds a slot", 120)
        try:
            with pytest.raises(StartTimeout, match=r"0 of 2 ranks were ready.*task 0 \(not started: no slot"):
                launch(spark, lambda: Path(tmp_path, "started").touch(), start_timeout=3)
        finally:
            Path(tmp_path, "go").touch()
            job.join(60)
        assert not Path(tmp_path, "started").exists()
        assert launch(spark, lambda: 1) == [1, 1]


def test_a_source_that_fails_is_sparks_own_error(spark: Any) -> None:
    frame = spark.range(10).selectExpr("cast(raise_error('the source broke') as double) as x")
    with pytest.raises(JobFailed, match="the source broke") as error:
        launch(spark, lambda: tr.world().shard("train").rows, data={"train": frame})
    assert "the source broke" in str(error.value.spark_error)


def test_a_python_worker_is_left_as_it_was_found(spark: Any) -> None:
    def look(batches: Iterator[Any]) -> Iterator[Any]:
        import os
        import threading

        import pyarrow as pa

        for _ in batches:
            pass
        threads = [thread.name for thread in threading.enumerate() if "tritium" in thread.name]
        names = [name for name in os.environ if name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "MINE")]
        sockets = [str(c.laddr) for c in psutil.Process().net_connections("tcp") if c.status in ("LISTEN", "NONE")]
        yield pa.RecordBatch.from_pydict({"left": [str([*threads, *names, *sockets])]})

    launch(spark, lambda: None, env={"MINE": "1"})
    rows = spark.range(0, 2, 1, 2).mapInArrow(look, "left string").collect()
    assert [row.left for row in rows] == ["[]", "[]"]


@contextlib.contextmanager
def with_settings(spark: Any, **values: str) -> Iterator[None]:
    """Set `spark.tritium.driver.<name>` for a block."""
    for name, value in values.items():
        spark.conf.set(f"spark.tritium.driver.{name}", value)
    try:
        yield
    finally:
        for name in values:
            spark.conf.unset(f"spark.tritium.driver.{name}")


@pytest.mark.skipif(not os.path.exists("/proc/net/if_inet6"), reason="needs IPv6")
def test_a_gang_over_ipv6(spark: Any) -> None:
    def train() -> tuple[str | None, str | None, float]:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        total = torch.tensor(tr.world().rank + 1.0)
        dist.all_reduce(total)
        dist.destroy_process_group()
        return os.environ.get("MASTER_ADDR"), os.environ.get("GLOO_SOCKET_IFNAME"), total.item()

    with with_settings(spark, host="::1"):
        assert launch(spark, train, framework="torch") == [("::1", "lo", 3.0)] * 2


def test_an_address_that_leads_nowhere_is_named_after_seconds(spark: Any) -> None:
    began = time.monotonic()
    with (
        with_settings(spark, bindAddress="127.0.0.1", host="127.0.0.2"),
        pytest.raises(BadSetting, match=r"can't reach the coordinator at 127\.0\.0\.2:\d+, tried for 10 s: .* refused"),
    ):
        launch(spark, lambda: 1, retries=2)
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("cluster", ["local-cluster", "connect"], indirect=True)
def test_a_rank_imports_what_came_with_the_session(cluster: Any, tmp_path: Path) -> None:
    name = f"came_with_{cluster.kind.replace('-', '_')}"
    Path(tmp_path, f"{name}.py").write_text("WHERE = __file__\n")
    if cluster.kind == "connect":
        cluster.spark.addArtifact(str(tmp_path / f"{name}.py"), pyfile=True)
    else:
        cluster.spark.sparkContext.addPyFile(str(tmp_path / f"{name}.py"))

    def train() -> str:
        return str(importlib.import_module(name).WHERE)

    found = launch(cluster.spark, train)
    assert len(found) == 2
    assert not any(where.startswith(str(tmp_path)) for where in found)  # Spark's copy


class Metric:
    """A class of the user's, of a module that executors can't import by this name."""

    def __init__(self, value: int) -> None:
        self.value = value


def squared(metric: Metric) -> Metric:
    return Metric(metric.value**2)


def test_packages_of_the_ranks_alone_leave_sparks_python_as_it_is(spark: Any, tmp_path: Path) -> None:
    ours = wheel(tmp_path, "velocipedes", "1.0", "import pyarrow\n")

    def train() -> tuple[str, str]:
        import velocipedes

        return velocipedes.__file__, velocipedes.pyarrow.__file__

    def looks(batches: Any) -> Any:
        import importlib.util

        for _ in batches:
            yield pa.record_batch({"there": [importlib.util.find_spec("velocipedes") is not None]})

    root = Path(tempfile.gettempdir(), f"tritium-environments-{os.getuid()}")  # Executors have this environment.
    try:
        places = launch(spark, train, env_packages=[str(ours)])
        assert len(set(places)) == 1
        assert places[0][0].startswith(f"{root}{os.sep}")
        assert places[0][1] == pa.__file__  # From the executors' Python.
        frame: Any = spark.range(0, 2, 1, 2)
        assert not any(row.there for row in frame.mapInArrow(looks, "there boolean").collect())
    finally:
        shutil.rmtree(root, ignore_errors=True)


def test_own_classes_have_their_module_in_a_rank_and_in_what_it_spawns(spark: Any) -> None:
    def train() -> Metric:
        import multiprocessing
        import pickle

        metric = pickle.loads(pickle.dumps(Metric(3)))
        assert type(metric) is Metric
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            (found,) = pool.map(squared, [metric])
        assert type(found) is Metric
        return found

    (metric,) = launch(spark, train, ranks=1)
    assert type(metric) is Metric
    assert metric.value == 9


def test_what_a_function_captures_of_spark_is_named(spark: Any) -> None:
    frame = spark.range(3)
    with pytest.raises(BadFunction, match=r"'frame' \(a .*DataFrame\).*data="):
        launch(spark, lambda: frame.count())
    with pytest.raises(BadFunction, match=r"'spark' \(a .*SparkSession\)"):
        launch(spark, lambda: spark.range(3).count())


def test_a_table_is_no_dataframe(spark: Any) -> None:
    import pandas as pd

    with pytest.raises(BadSetting, match=r"data must be Spark DataFrames.*createDataFrame"):
        tr.launch(lambda: None, data={"train": pd.DataFrame({"x": [1.0]})}, progress=False)


# ---- the control port


@pytest.mark.parametrize("tls", [False, True])
def test_strangers_on_the_control_port_change_nothing(tls: bool, spark: Any, tmp_path: Path) -> None:
    def listening() -> set[tuple[str, int]]:
        found = psutil.Process().net_connections("tcp")
        return {tuple(c.laddr) for c in found if c.status == psutil.CONN_LISTEN}

    def train() -> list[int]:
        world = tr.world()
        Path(tmp_path, str(world.rank)).touch()
        wait(Path(tmp_path, "go").exists, "the strangers have had their say", 120)
        return world.gather(world.rank)

    before = listening()
    run = Background(spark, train, tls=tls)
    wait(lambda: Path(tmp_path, "0").exists() and Path(tmp_path, "1").exists(), "both ranks run", 120)
    (port,) = listening() - before
    chance = random.Random(4)
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            half_open = stack.enter_context(socket.create_connection(port))
            half_open.sendall(chance.randbytes(chance.randint(0, 40)))
        for size in (64, 1000, 100_000):
            with socket.create_connection(port) as stranger, contextlib.suppress(ConnectionError):
                stranger.sendall(chance.randbytes(size))
        with pytest.raises(WireError):
            Channel.connect(port, b"a guess", 5, new_certificate() if tls else None)
        Path(tmp_path, "go").touch()
        assert run.join() == [[0, 1]] * 2


# ---- other Pythons on the executors


@pytest.fixture(scope="module")
def python_without(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Return a function that makes a Python like this one without some packages, and without Tritium."""
    made: dict[tuple[str, ...], str] = {}

    def make(*packages: str) -> str:
        if packages not in made:
            folder = tmp_path_factory.mktemp("python")
            venv.create(folder, symlinks=True)
            there = Path(pytest.__file__).parents[1]
            (here,) = folder.glob("lib/python*/site-packages")
            for entry in there.iterdir():
                name = entry.name.lower()
                if "tritium" not in name and name.partition("-")[0].partition(".")[0] not in packages:
                    here.joinpath(entry.name).symlink_to(entry)
            made[packages] = str(folder / "bin" / "python")
        return made[packages]

    return make


@pytest.fixture
def executors_with(spark: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return lambda python: monkeypatch.setattr(spark.sparkContext, "pythonExec", python)


class TestExecutorsThatLack:
    def test_tritium_and_cloudpickle_run_a_gang(
        self, spark: Any, python_without: Callable[..., str], executors_with: Callable[[str], None]
    ) -> None:
        def found(batches: Iterator[Any]) -> Iterator[Any]:
            import importlib.util
            import sys

            import pyarrow as pa

            for _ in batches:
                pass
            packages = [name for name in ("tritium", "cloudpickle", "torch") if importlib.util.find_spec(name)]
            yield pa.RecordBatch.from_pydict({"packages": [" ".join(packages)], "python": [sys.executable]})

        executors_with(python := python_without("cloudpickle", "torch"))
        rows = spark.range(0, 1, 1, 1).mapInArrow(found, "packages string, python string").collect()
        assert [(row.packages, row.python) for row in rows] == [("", python)]

        def train() -> tuple[str, list[int], float]:
            (epoch,) = tr.world().shard("train").epochs(1, batch_size=10)
            total = sum(float(batch["x"][: batch.rows].sum()) for batch in epoch)
            return sys.executable, tr.world().gather(tr.world().rank), total

        frame = spark.range(0, 100, 1, 4).selectExpr("cast(id as double) as x")
        (used, ranks, first), (_, _, second) = launch(spark, train, data={"train": frame})
        assert (used, ranks, first + second) == (python, [0, 1], 4950.0)

    def test_the_framework_are_named_with_host_and_command(
        self, spark: Any, python_without: Callable[..., str], executors_with: Callable[[str], None]
    ) -> None:
        executors_with(python := python_without("cloudpickle", "torch"))
        with pytest.raises(WrongVersion) as error:
            launch(spark, lambda: None, framework="torch")
        assert f"torch can't be imported on {socket.gethostname()} by {python}" in str(error.value)
        assert f"Install it there: {python} -m pip install torch" in str(error.value)

    def test_pyarrow_are_named_before_anything_starts(
        self, spark: Any, python_without: Callable[..., str], executors_with: Callable[[str], None]
    ) -> None:
        executors_with(python_without("pyarrow"))
        with pytest.raises(WrongVersion, match=r"Spark's workers, .*, lacks 'pyarrow'\. Set PYSPARK_PYTHON="):
            launch(spark, lambda: None)


def test_another_python_version_on_the_executors_is_said(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark.sparkContext, "pythonVer", "3.9")  # what the driver says that it is
    with pytest.raises(WrongVersion, match=r"different Python versions: .*3\.9.*spark\.pyspark\.python"):
        launch(spark, lambda: None)


def test_a_udf_that_runs_in_another_python_is_noted_once(
    spark: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from pyspark.sql import functions as F

    from tritium.spark import python as worker_python

    def notes(frame: Any, name: str) -> list[str]:
        run_dir = tmp_path / name
        launch(spark, lambda: tr.world().rank, ranks=1, data={"train": frame}, run_dir=str(run_dir))
        found = json.loads((run_dir / "report.json").read_text())["notes"]
        return [note for note in found if "PYSPARK_PYTHON" in note]

    plus = F.udf(lambda x: x + 1, "long").asNondeterministic()
    frame = spark.range(4).select(plus("id").alias("x"))  # made for this Python: so it runs
    frame.schema  # noqa: B018 - by now
    other = tmp_path / "python3"
    other.write_text("#!/bin/sh\nexit 1\n")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("PYSPARK_PYTHON")
    monkeypatch.setattr(spark._sc, "pythonExec", "python3")
    monkeypatch.setattr(worker_python, "_noted", False)
    assert notes(spark.range(4), "none") == []
    (note,) = notes(frame, "first")
    assert f"(<lambda>) run in {other}, Spark's default, not in this Python" in note
    assert f"os.environ['PYSPARK_PYTHON'] = {sys.executable!r} before the session is made" in note
    assert notes(frame, "second") == []
    for other_frame in (spark.range(4).mapInPandas(lambda batches: batches, "id long"), frame.where("x > 1")):
        monkeypatch.setattr(worker_python, "_noted", False)
        assert worker_python.note_of_functions(spark, [other_frame]) is not None


# ---- GPUs, pretended


@pytest.mark.parametrize("cluster", ["standalone-gpus"], indirect=True)
class TestGpus:
    """Two executors with the GPUs 0 and 1 each, both on this machine."""

    def where(self) -> tuple[Any, ...]:
        world = tr.world()
        return os.environ["CUDA_VISIBLE_DEVICES"], world.local_rank, world.device, [p.device for p in world.peers]

    def test_of_one_executor_are_visible_to_all_its_ranks_in_the_order_of_local_ranks(self, cluster: Any) -> None:
        results = launch(cluster.spark, self.where, ranks=4, gpus=1)
        devices = ["cuda:0", "cuda:1"] * 2
        assert results == [("0,1", rank % 2, f"cuda:{rank % 2}", devices) for rank in range(4)]

    def test_several_a_rank(self, cluster: Any) -> None:
        results = launch(cluster.spark, self.where, ranks=2, gpus=2)
        assert results == [("0,1", 0, "cuda:0", ["cuda:0", "cuda:0"])] * 2

    def test_more_than_there_are(self, cluster: Any) -> None:
        with pytest.raises(NotEnoughSlots, match="5 ranks need 5 slots"):
            launch(cluster.spark, self.where, ranks=5, gpus=1)

    def test_of_a_task_are_a_rank_of_old_codes(self, cluster: Any) -> None:
        from tritium.compat import HorovodRunner

        assert HorovodRunner(np=2).run(self.where)[2].startswith("cuda:")

    def test_cores_of_a_rank(self, cluster: Any) -> None:
        def train() -> str:
            return os.environ["OMP_NUM_THREADS"]

        assert launch(cluster.spark, train, ranks=2, cpus=2, gpus=1) == ["2", "2"]


# ---- drivers of their own

DRIVER = """
import os, sys, threading, time
from pathlib import Path
import tritium as tr
from pyspark.sql import SparkSession

folder = sys.argv[1]
builder = SparkSession.builder.master("local[2]")
for pair in sys.argv[2:]:
    builder = builder.config(*pair.split("=", 1))
spark = builder.getOrCreate()

def launch(fn):
    return tr.launch(fn, ranks=2, spark=spark, progress=False, output="none")
"""


def driver(script: str, folder: Path, **conf: str) -> subprocess.Popen[str]:
    arguments = [f"{key}={value}" for key, value in {**COMMON, **conf}.items()]
    command = [sys.executable, "-W", "ignore", "-c", DRIVER + script, str(folder), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


class TestTheDriver:
    @pytest.mark.timeout(240)  # 15 s on an idle machine
    def test_takes_500_mb_of_results_and_refuses_more_than_its_limit(self, tmp_path: Path) -> None:
        script = """
import faulthandler
import numpy as np
faulthandler.dump_traceback_later(150)
MB = 1 << 20

def train(size):
    return lambda: np.full(size * MB, tr.world().rank, np.uint8)

began = time.monotonic()
for rank, array in enumerate(launch(train(250))):
    assert array.nbytes == 250 * MB and array[0] == array[-1] == rank and (array == rank).all()
print("500 MB", time.monotonic() - began, file=sys.stderr, flush=True)
try:
    launch(train(260))
except tr.errors.ResultError as error:
    print(error)
print(launch(lambda: 1))
spark.stop()
"""
        conf = {"spark.driver.memory": "4g", "spark.driver.maxResultSize": "510m"}
        with driver(script, tmp_path, **conf) as process:
            try:
                output, errors = process.communicate(timeout=200)
            except subprocess.TimeoutExpired as late:
                pytest.fail(f"{late.stdout!r}\n{(late.stderr or b'').decode()[-6000:]}", pytrace=False)
            finally:
                process.kill()
        refused, after = output.splitlines()
        assert "500 MB" in errors
        assert refused.startswith("The results of all ranks together are over spark.driver.maxResultSize"), errors
        assert "raise that setting" in refused
        assert after == "[1, 1]"

    def test_encrypts_as_spark_does_where_it_can_make_a_certificate(self, tmp_path: Path) -> None:
        script = """
encrypted = lambda: tr.world()._control.certificate is not None
print(launch(encrypted))
sys.modules["cryptography"] = None
notes = lambda run: [e.text for e in run.events() if isinstance(e, tr.events.Note) and "encrypt" in e.text]
with tr.submit(encrypted, ranks=2, spark=spark, progress=False, output="none") as run:
    print(run.result(), *notes(run))
spark.stop()
"""
        conf = {"spark.authenticate": "true", "spark.network.crypto.enabled": "true"}
        with driver(script, tmp_path, **conf) as process:
            output, errors = process.communicate()
        assert process.returncode == 0, errors
        first, second = output.splitlines()
        assert first == "[True, True]"
        assert second.startswith("[False, False] spark.network.crypto.enabled=true encrypts Spark's own connections")


# ---- Spark Connect from behind a wall

FAR_CLIENT = """
import os, sys, time
from pyspark.sql import SparkSession
import tritium as tr

spark = SparkSession.builder.remote(sys.argv[1]).create()

def train():
    world = tr.world()
    print("hello from", world.rank)
    world.log(step=0, loss=0.5)
    world.store(f"{world.rank}.bin", [b"abc"])
    (epoch,) = world.shard("train").epochs(1, batch_size=10)
    return world.gather(world.rank), sum(float(b["x"][: b.rows].sum()) for b in epoch)

frame = spark.range(0, 100, 1, 4).selectExpr("cast(id as double) as x")
results = tr.launch(train, ranks=2, spark=spark, data={"train": frame}, run_dir=sys.argv[2])
print("RESULTS", [gathered for gathered, _ in results], sum(total for _, total in results))

def fail():
    world = tr.world()
    print("last words")
    world.barrier()
    time.sleep(12)  # beyond start_timeout: the client can't hear that the gang has formed
    if world.rank == 1:
        raise KeyError("far away")
    time.sleep(600)

try:
    tr.launch(fail, ranks=2, spark=spark, progress=False, start_timeout=10)
except tr.errors.RankFailed as error:
    print("FAILED", error.rank, repr(error.__cause__), error.log, "in fail" in error.traceback)
print("COUNT", spark.range(5).count())

def bring(megabytes, stored):
    def train():
        world = tr.world()
        print("x" * 20_000_000)
        if world.rank == 1:
            world.store("weights.bin", [bytes(1_000_000)] * stored)
        return bytes(megabytes * 1_000_000)
    return train

for case, megabytes, stored in ("fits", 25, 5), ("results", 40, 1), ("file", 1, 70):
    try:
        results = tr.launch(
            bring(megabytes, stored), ranks=2, spark=spark, progress=False, output="none", retries=0,
            run_dir=f"{sys.argv[3]}/{case}",
        )
        there = os.path.getsize(f"{sys.argv[3]}/{case}/weights.bin")
        print("BROUGHT", case, [len(result) for result in results], there)
    except tr.errors.TritiumError as error:
        print("REFUSED", case, type(error).__name__, error)
spark.stop()
"""


@contextlib.contextmanager
def namespace() -> Iterator[str]:
    """Yield a network namespace with an address of its own and no route out."""
    name = f"tritium-{os.getpid()}"
    for command in (f"netns add {name}", f"-n {name} link set lo up", f"-n {name} addr add {FAR}/32 dev lo"):
        made = subprocess.run(["ip", *command.split()], capture_output=True, text=True)
        if made.returncode:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            pytest.skip(f"no network namespace can be made here: {made.stderr.strip()}")
    try:
        yield name
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)


FAR = "10.77.0.1"


@contextlib.contextmanager
def passage(name: str, target: tuple[str, int]) -> Iterator[int]:
    """Yield a port inside the namespace that forwards to `target` outside, in that direction only."""
    listening: list[socket.socket] = []

    def enter() -> None:  # a namespace belongs to a thread, and a socket stays where it was made
        with open(f"/var/run/netns/{name}") as file:
            assert ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0) == 0
        listening.append(socket.create_server((FAR, 0)))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    (server,) = listening
    ours, theirs = socket.socketpair()
    serving = threading.Thread(target=_forward, args=(server, target, theirs))
    serving.start()
    try:
        yield server.getsockname()[1]
    finally:
        ours.close()
        serving.join()
        theirs.close()


def _forward(server: socket.socket, target: tuple[str, int], until: socket.socket) -> None:
    pairs: dict[socket.socket, socket.socket] = {}
    with server:
        while until not in (ready := select.select([server, until, *pairs], [], [])[0]):
            for sock in ready:
                if sock is server:
                    client, out = server.accept()[0], socket.create_connection(target)
                    pairs |= {client: out, out: client}
                elif sock in pairs:
                    data = b""
                    with contextlib.suppress(ConnectionError):
                        data = sock.recv(1 << 16)
                    if data:
                        pairs[sock].sendall(data)
                    else:
                        for end in (sock, pairs.pop(sock)):
                            pairs.pop(end, None)
                            end.close()
    for sock in pairs:
        sock.close()


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="network namespaces need root on Linux")
@pytest.mark.parametrize("cluster", ["connect"], indirect=True)
def test_a_connect_client_that_executors_cant_reach(cluster: Any, tmp_path: Path) -> None:
    host, _, server_port = cluster.spark.client._builder.endpoint.rpartition(":")
    run_dir = tmp_path / "run"
    with namespace() as name, passage(name, (host, int(server_port))) as port:
        # A file system of its own lies over `own`: executors see none of the files in it.
        own = 'mount -t tmpfs none $0 && exec "$@"'
        inside = ["ip", "netns", "exec", name, "sh", "-c", own, str(tmp_path / "own"), sys.executable, "-W", "ignore"]
        (tmp_path / "own").mkdir()
        client = subprocess.run(
            [*inside, "-c", FAR_CLIENT, f"sc://{FAR}:{port}", str(run_dir), str(tmp_path / "own")],
            capture_output=True,
            text=True,
            timeout=240,
        )
    lines = client.stdout.splitlines()
    assert "RESULTS [[0, 1], [0, 1]] 4950.0" in lines, client.stdout + client.stderr
    assert {"[rank 0] hello from 0", "[rank 1] hello from 1"} <= set(lines)
    assert "Executors could not reach this client" in notes(run_dir)
    assert '"values": {"loss": 0.5}' in (run_dir / "events.jsonl").read_text()
    assert [(run_dir / f"{rank}.bin").read_bytes() for rank in range(2)] == [b"abc"] * 2
    assert [(run_dir / f"logs/rank-{rank}.log").read_text() for rank in range(2)] == [
        "hello from 0\n",
        "hello from 1\n",
    ]
    assert "FAILED 1 KeyError('far away') ['last words'] True" in lines, client.stdout + client.stderr
    assert "COUNT 5" in lines
    # The server's spark.driver.maxResultSize is 64m: the logs give way to 50 MB of results and a file of 5.
    fits, results, file = [line for line in lines if line.startswith(("BROUGHT", "REFUSED"))]
    assert fits == "BROUGHT fits [25000000, 25000000] 5000000", client.stdout + client.stderr
    assert results.startswith("REFUSED results ResultError The results of all ranks together are over spark.driver.max")
    assert file.startswith("REFUSED file StoreFailed")
    assert "over 60,397,977, which is what spark.driver.maxResultSize lets through. Raise that setting" in file
