"""YARN, as users meet it: client and cluster mode, queues, GPUs, packed environments, and what is killed.

Each driver is a process of its own, started by spark-submit. The contract of a launch runs on YARN in `make managers`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import time
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import leaks
from clusters import spark_script, wait
from yarn_cluster import EXPIRY_SECONDS, GPUS, MASTER, Yarn, yarn

pytestmark = pytest.mark.timeout(900)

ENVIRONMENT = "./environment/bin/python"
LOOK = """
import importlib.util, json, os, sys
import tritium as tr
from pyspark.sql import SparkSession

def look():
    installed = any(os.path.isdir(f"{folder}/tritium") for folder in sys.path if folder.startswith(sys.prefix))
    world = tr.world()
    (epoch,) = world.shard("train").epochs(1, batch_size=8)
    rows = sum(float(sum(batch["x"][:batch.rows])) for batch in epoch)
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES"), world.device
    return dict(host=os.environ["NM_HOST"], prefix=sys.prefix, installed=installed, rows=rows, gpus=gpus)

spark = SparkSession.builder.getOrCreate()
ranks = int(sys.argv[2])
rows = spark.range(100).selectExpr("cast(id as double) as x")
settings = dict(gpus=1) if ranks > 2 else {}
found = tr.launch(look, ranks=ranks, data={"train": rows}, spark=spark, start_timeout=200, **settings)
with open(sys.argv[1], "w") as file:
    json.dump({"id": spark.sparkContext.applicationId, "ranks": found}, file)
"""

FAULTS = """
import json, os, sys, time
from pathlib import Path
import numpy as np
import tritium as tr
from pyspark.sql import SparkSession
from tritium.errors import TritiumError

folder = Path(sys.argv[1])

def train(fault):
    world = tr.world()
    mine = Path(folder, f"{fault}-{world.rank}")
    again = any(world.gather(mine.exists()))
    world.barrier()
    mine.write_text(os.environ["NM_HOST"])
    ballast = np.ones(1) if again or fault != "memory" or world.rank else np.ones(400 << 20)
    while not again:
        world.barrier()
        time.sleep(0.1)
    return os.environ["NM_HOST"]

spark = SparkSession.builder.getOrCreate()
for fault in ("memory", "host", "master", "application"):
    settings = dict(retries=1, start_timeout=150, run_dir=f"{folder}/{fault}", progress=False, output="none")
    try:
        tr.launch(train, ranks=2, args=(fault,), spark=spark, **settings)
    except TritiumError as error:
        print(json.dumps(f"{type(error).__name__}: {error}"), flush=True)
    else:
        report = json.loads(Path(folder, fault, "report.json").read_text())
        print(json.dumps([retry["reason"] for retry in report["retries"]] + report["notes"]), flush=True)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Yarn]:
    with yarn() as one:
        yield one


def submitted(cluster: Yarn, folder: Path, script: str, *arguments: str, mode: str = "client", **conf: str) -> Any:
    """Start a program by spark-submit."""
    (folder / "train.py").write_text(script)
    settings = cluster.settings(**{"spark.driver.memory": "512m", **conf})
    if mode == "cluster":  # The driver runs on a host of YARN's.
        settings = {
            key: value for key, value in settings.items() if key[:14] not in ("spark.driver.h", "spark.driver.b")
        }
    environment = {**os.environ, "HADOOP_CONF_DIR": str(cluster.conf)}
    del environment["PYTHONPATH"]  # YARN passes it on, and a packed environment lacks what tests/lean imports
    command = [spark_script("spark-submit"), "--master", "yarn", "--deploy-mode", mode]
    command += [word for key, value in settings.items() for word in ("--conf", f"{key}={value}")]
    command += ["train.py", *arguments]
    with (folder / "log").open("w") as log:
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)


def looked(cluster: Yarn, folder: Path, ranks: int = 2, **options: Any) -> dict[str, Any]:
    """Run LOOK, and return what its ranks have found."""
    answer = folder / "answer.json"
    with submitted(cluster, folder, LOOK, str(answer), str(ranks), **options) as process:
        output, _ = process.communicate(timeout=600)
    assert answer.exists(), output[-3000:] + (folder / "log").read_text()[-3000:]
    return dict(json.loads(answer.read_text()))


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return an archive of a virtual environment with the packages that a rank needs, and without Tritium."""
    folder = tmp_path_factory.mktemp("packed")
    venv.create(folder / "environment", symlinks=True)
    site = next((folder / "environment").glob("lib/python*/site-packages")).relative_to(folder / "environment")
    with tarfile.open(folder / "environment.tar.gz", "w:gz", compresslevel=1) as archive:
        archive.add(folder / "environment", ".")
        for package in (np, pa):
            place = Path(str(package.__file__)).parent
            for part in place.parent.glob(f"{place.name}*"):
                if part.name in (place.name, f"{place.name}.libs"):
                    archive.add(part, site / part.name)
    return f"{folder}/environment.tar.gz#environment"


def test_executors_run_a_packed_environment_without_tritium(cluster: Yarn, packed: str, tmp_path: Path) -> None:
    conf = {"spark.yarn.dist.archives": packed, "spark.pyspark.python": ENVIRONMENT}
    found = looked(cluster, tmp_path, **conf, **{"spark.pyspark.driver.python": sys.executable})
    assert [rank["installed"] for rank in found["ranks"]] == [False, False]
    assert all(rank["prefix"].endswith("/environment") for rank in found["ranks"])
    assert sum(rank["rows"] for rank in found["ranks"]) == 4950
    assert {rank["host"] for rank in found["ranks"]} <= {"127.0.0.2", "127.0.0.3"}


def test_cluster_mode_in_a_queue(cluster: Yarn, tmp_path: Path) -> None:
    found = looked(cluster, tmp_path, mode="cluster", **{"spark.yarn.queue": "gangs"})
    assert sum(rank["rows"] for rank in found["ranks"]) == 4950
    application = cluster.ask(f"apps/{found['id']}")["app"]
    assert (application["queue"].rpartition(".")[2], application["finalStatus"]) == ("gangs", "SUCCEEDED")


def test_gpus_are_granted_by_yarn_and_assigned_by_spark(cluster: Yarn, tmp_path: Path) -> None:
    """Pretended ones: YARN counts them, and the discovery script names them."""
    script = tmp_path / "gpus.sh"
    script.write_text(f"""#!/bin/sh\necho '{json.dumps({"name": "gpu", "addresses": ["0", "1"]})}'\n""")
    script.chmod(0o755)
    conf = {
        "spark.executor.cores": str(GPUS),
        "spark.executor.resource.gpu.amount": str(GPUS),
        "spark.executor.resource.gpu.discoveryScript": str(script),
    }
    found = looked(cluster, tmp_path, 2 * GPUS, **conf)
    assert [rank["gpus"] for rank in found["ranks"]] == [["0,1", "cuda:0"], ["0,1", "cuda:1"]] * 2
    seconds = json.dumps(cluster.ask(f"apps/{found['id']}")["app"]["resourceSecondsMap"])
    assert re.search(r'"yarn.io/gpu", "value": "?[1-9]', seconds), seconds


def test_a_queue_that_does_not_exist_is_named(cluster: Yarn, tmp_path: Path) -> None:
    conf = [
        word for pair in cluster.settings(**{"spark.yarn.queue": "nope"}).items() for word in ("--conf", "=".join(pair))
    ]
    command = [str(Path(sys.executable).with_name("tritium")), "doctor", "--json", "--master", "yarn", *conf]
    with cluster.chosen():
        answer = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert answer.returncode == 1
    (problem,) = [finding for finding in json.loads(answer.stdout)["findings"] if finding["level"] == "error"]
    assert problem["subject"] == "session"
    assert "to unknown queue: nope" in problem["result"]


def test_what_is_killed_is_named_and_the_gang_starts_again(cluster: Yarn, tmp_path: Path) -> None:
    """A container over its memory, a host, the ApplicationMaster; at last the ApplicationMaster of the last attempt."""
    with submitted(cluster, tmp_path, FAULTS, str(tmp_path)) as driver:
        assert driver.stdout is not None

        def outcome(fault: str) -> tuple[Any, float]:
            wait(lambda: all(Path(tmp_path, f"{fault}-{rank}").exists() for rank in range(2)), "both ranks run", 200)
            began = time.monotonic()
            if fault == "host":
                (master,) = cluster.containers(MASTER)
                (number,) = (k for k in range(2) if master not in cluster.nodes[k].children(recursive=True))
                cluster.kill_node(number)
                cluster.start_node(f"127.0.0.{len(cluster.nodes) + 2}")
                leaks.STRANGERS.add(cluster.nodes[-1].pid)  # It stays for the tests after this one.
            elif fault != "memory":
                (master,) = cluster.containers(MASTER)
                master.kill()
            lines = (line for line in driver.stdout if line.startswith(("[", '"')))
            return json.loads(next(lines)), time.monotonic() - began

        try:
            told, _ = outcome("memory")
            assert "Container killed by YARN for exceeding physical memory limits" in told[0]
            told, seconds = outcome("host")
            assert re.search(r"rank \d on \S+ was lost: its supervisor is gone \(nothing was heard of it for", told[0])
            assert any("yarn.nm.liveness-monitor.expiry-interval-ms" in note for note in told)
            assert seconds > EXPIRY_SECONDS
            told, _ = outcome("master")
            assert re.search(r"rank \d on \S+ was lost: ExecutorLostFailure .*Executor Process Lost", told[0])
            told, seconds = outcome("application")
            stopped = r"SparkSession (was|has been) stopped.* application_\d+_\d+"
            assert re.search(stopped, told)
            assert seconds < 60
        finally:
            driver.kill()
