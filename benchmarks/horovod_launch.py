"""How long two ranks take to `hvd.init()` and one `hvd.allreduce`: `launch` against horovodrun, side by side.

    .venv/bin/python benchmarks/horovod_launch.py [--ranks 2] [--times 5] [--save]

In the environment of `make horovod`, which is made the first time. horovodrun is a command for every training, so its
clock runs from its start to its end; that of `launch` from the call to the results, as ranks on this machine, and on a
warm Spark session. Beside them what importing torch in as many processes at once takes: no way can do without it. Each
way once before, then in turn; medians of `--times`. Goal: no longer than horovodrun.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import _suite

PROGRAM = """
import torch
import horovod.torch as hvd
hvd.init()
assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == {ranks}
"""


def with_horovodrun(ranks: int) -> None:
    command = [sys.executable, str(Path(sys.executable).with_name("horovodrun")), "--gloo", "-np", str(ranks)]
    program = PROGRAM.format(ranks=ranks)
    subprocess.run([*command, sys.executable, "-c", program], check=True, capture_output=True)


def with_launch(ranks: int, **where: Any) -> None:
    import tritium as tr

    def form() -> float:
        import horovod.torch as hvd
        import torch

        hvd.init()
        return float(hvd.allreduce(torch.ones(1), op=hvd.Sum))

    found = tr.launch(form, ranks=ranks, framework="horovod", progress=False, output="none", **where)
    assert found == [ranks] * ranks


def import_torch(ranks: int) -> None:
    processes = [subprocess.Popen([sys.executable, "-c", "import horovod.torch"]) for _ in range(ranks)]
    assert [process.wait() for process in processes] == [0] * ranks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    if find_spec("horovod") is None:
        made = subprocess.run([_suite.ROOT / "scripts" / "horovod.sh"], stdout=subprocess.PIPE, text=True, check=True)
        return subprocess.run([made.stdout.split()[-1], __file__, *sys.argv[1:]], check=False).returncode
    with tempfile.TemporaryDirectory(prefix="tritium-bench-runs-") as runs:
        os.environ.update(TRITIUM_RUNS=runs, OMP_NUM_THREADS="1", PYSPARK_PYTHON=sys.executable)
        os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
        from pyspark.sql import SparkSession

        spark = SparkSession.builder.master(f"local[{options.ranks}]").getOrCreate()
        spark.sparkContext.setLogLevel("ERROR")
        ways = {
            "horovodrun": with_horovodrun,
            "launch, on the driver": partial(with_launch, on="driver"),
            "launch, on Spark": partial(with_launch, spark=spark),
            "import alone": import_torch,
        }
        for way in ways.values():
            way(options.ranks)
        found: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(options.times):
            _suite.quiet()
            for name, way in ways.items():
                found[name].append(_suite.seconds_of(way, options.ranks))
        spark.stop()
    print(f"\n{'way':<24}{'s':>8}  range")
    for name, times in found.items():
        print(f"{name:<24}{statistics.median(times):>8.2f}  {min(times):.2f} – {max(times):.2f}")
    if options.save:
        _suite.save("horovod_launch", {"ranks": options.ranks, "times": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
