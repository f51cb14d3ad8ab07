"""Memory of every process of a training over 1M and 16M rows of 64 floats: what grows with the rows and what doesn't.

    .venv/bin/python benchmarks/memory.py [--rows 1000000 16000000] [--shuffle full] [--save]

For each number of rows a fresh session (local[2], 2 ranks) takes one epoch over all batches, and a thread reads
/proc/PID/smaps_rollup of the driver's Python, of the supervisors (Spark's Python workers) and of the ranks. Printed is
the peak over time of the largest process of each kind, in MB:

    private   Pss_Anon + Pss_Shmem: what the process itself has allocated. This is what stays flat.
    mapped    Pss_File: code and, in a rank, pages of the mapped spool. They are the page cache's: there as long as
              nobody else needs the memory, and gone at once when somebody does, without being written again.
    PSS       both together.

The last table is the ratio of the largest to the smallest number of rows; private memory is promised to grow by at
most a tenth (exit code 1 otherwise). The whole tree beside the peers': benchmarks/train.py --memory. `--save` writes
benchmarks/results/memory.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

import _suite
import psutil

sys.path.insert(0, str(_suite.SYSTEMS))
import work

WIDTH, RANKS, BATCH = 64, 2, 1024
LONGEST = 10.0  # seconds for which a rank stays to be seen
KINDS = ("driver", "supervisor", "rank")
COLUMNS = ("private", "mapped", "pss")
ALLOWED = 1.1


class Sampler(_suite.Sampler):
    """Keeps the peak of each kind of process."""

    def __init__(self, seen: str) -> None:
        super().__init__()
        self.peaks = {kind: dict.fromkeys(COLUMNS, 0.0) for kind in KINDS}
        self.seen = seen  # a file that is there once a process of every kind was looked at

    def look(self) -> None:
        """At the driver, the supervisors and the ranks."""
        self._look(os.getpid(), "driver")
        for process in psutil.Process().children(recursive=True):
            try:
                kind = kind_of(process)
            except psutil.Error:
                continue
            if kind is not None:
                self._look(process.pid, kind)
        if all(peak["pss"] for peak in self.peaks.values()):
            with open(self.seen, "w"):
                pass

    def _look(self, pid: int, kind: str) -> None:
        try:
            with open(f"/proc/{pid}/smaps_rollup") as file:
                lines = [line.split() for line in file.readlines()[1:]]
        except OSError:  # it has ended
            return
        found = {line[0].rstrip(":"): int(line[1]) / 1e3 for line in lines}
        if "Pss" not in found:
            return
        now = {"private": found["Pss_Anon"] + found["Pss_Shmem"], "mapped": found["Pss_File"], "pss": found["Pss"]}
        peak = self.peaks[kind]
        for column in COLUMNS:
            peak[column] = max(peak[column], now[column])


def kind_of(process: psutil.Process) -> str | None:
    """A rank, a supervisor (a worker below Spark's Python daemon), or neither; the fork server is neither."""
    own, parent = process.cmdline()[:4], process.parent()
    above = parent.cmdline()[:4] if parent is not None else []
    if "tritium.gang.rank." in " ".join(own):
        server = "tritium.gang.rank.fork_server"
        return "rank" if server not in " ".join(own) or server in " ".join(above) else None
    return "supervisor" if "pyspark.daemon" in own and "pyspark.daemon" in above else None


def take_all(seen: str) -> tuple[int, int]:
    """One epoch over every batch, each of whose numbers is read. Stays until the sampler has seen every process."""
    import tritium as tr

    rows = steps = 0
    for epoch in tr.world().shard("train").epochs(1, batch_size=BATCH):
        for batch in epoch:
            batch["x"].sum()
            rows, steps = rows + batch.rows, steps + 1
    begun = time.monotonic()
    while not os.path.exists(seen) and time.monotonic() - begun < LONGEST:
        time.sleep(0.02)
    return rows, steps


def measure(spark: Any, rows: int, shuffle: str) -> dict[str, Any]:
    """One launch, beside which this process and all below it are looked at."""
    from pyspark.sql import functions as F

    import tritium as tr

    packed = F.array_repeat(F.rand(0).cast("float"), WIDTH)  # cheap to make; what the numbers are makes no difference
    frame = spark.range(0, rows, 1, 16).select(packed.alias("x"))
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, Sampler(os.path.join(folder, "seen")) as sampler:
        data = {"train": tr.Data(frame, shuffle=shuffle)}
        results = tr.launch(take_all, ranks=RANKS, args=(sampler.seen,), data=data, spark=spark, progress=False)
    assert sum(taken for taken, _ in results) == rows
    return {"rows": rows, "seconds": round(time.perf_counter() - began, 1), "peaks": sampler.peaks}


def table(found: list[dict[str, Any]]) -> None:
    print(f"{'rows':>10} {'seconds':>8}  {'process':<11}{'private MB':>11}{'mapped MB':>11}{'PSS MB':>11}")
    for one in found:
        for kind in KINDS:
            numbers = "".join(f"{one['peaks'][kind][column]:>11.0f}" for column in COLUMNS)
            print(f"{one['rows']:>10,} {one['seconds']:>8.1f}  {kind:<11}{numbers}")


def ratios(first: dict[str, Any], last: dict[str, Any]) -> dict[str, dict[str, float]]:
    both = {kind: (first["peaks"][kind], last["peaks"][kind]) for kind in KINDS}
    return {
        kind: {column: round(after[column] / max(before[column], 1.0), 2) for column in COLUMNS}
        for kind, (before, after) in both.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000, 16_000_000])
    parser.add_argument("--shuffle", choices=("full", "stream"), default="full")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--only", type=int, help=argparse.SUPPRESS)  # in a process of its own, as JSON
    options = parser.parse_args()
    if options.only:
        work.prepare()
        spark = work.session(**{"spark.driver.memory": "2g"})
        found = measure(spark, options.only, options.shuffle)
        spark.stop()
        print(json.dumps(found))
        return 0
    sizes = []
    for rows in options.rows:
        command = [sys.executable, __file__, "--only", str(rows), "--shuffle", options.shuffle]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        sizes.append(json.loads(done.stdout.splitlines()[-1]))
    table(sizes)
    grown = ratios(sizes[0], sizes[-1])
    print(f"\n{sizes[-1]['rows']:,} rows / {sizes[0]['rows']:,} rows:")
    for kind in KINDS:
        print(f"  {kind:<11}" + "  ".join(f"{column} {grown[kind][column]:.2f}" for column in COLUMNS))
    flat = all(grown[kind]["private"] <= ALLOWED for kind in KINDS)
    print(f"private memory is {'flat' if flat else 'NOT flat'} (at most {ALLOWED} was promised)")
    if options.save:
        _suite.save("memory", {"shuffle": options.shuffle, "sizes": sizes, "ratio": grown, "flat": flat})
    return 0 if flat else 1


if __name__ == "__main__":
    sys.exit(main())
