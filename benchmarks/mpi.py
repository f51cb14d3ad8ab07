"""How long it takes to form MPI_COMM_WORLD on this machine: `launch` against mpirun of the same MPICH, side by side.

    .venv/bin/python benchmarks/mpi.py [--sizes 2 8 32] [--times 3] [--save]

Every rank is a Python process that imports mpi4py and passes a barrier. From the start of mpirun, or of `launch` in a
process that has imported Tritium, to the end of both. Median of `--times` in turn. Goal: at most 0.3 s more.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import _suite

import tritium as tr

PROGRAM = "from mpi4py import MPI; MPI.COMM_WORLD.barrier(); assert MPI.COMM_WORLD.size == {size}"


def with_mpirun(size: int) -> None:
    mpirun = Path(sys.executable).with_name("mpirun")
    subprocess.run([mpirun, "-n", str(size), sys.executable, "-c", PROGRAM.format(size=size)], check=True)


def with_launch(size: int) -> None:
    def form() -> int:
        from mpi4py import MPI

        MPI.COMM_WORLD.barrier()
        return int(MPI.COMM_WORLD.size)

    found = tr.launch(form, ranks=size, on="driver", framework="mpi", progress=False, output="none")
    assert found == [size] * size


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory(prefix="tritium-bench-runs-") as runs:
        os.environ["TRITIUM_RUNS"] = runs
        _suite.seconds_of(with_launch, 2)
        print(f"{'ranks':>6}{'mpirun s':>10}{'launch s':>10}{'more s':>8}")
        for size in options.sizes:
            _suite.quiet()
            pairs = [
                (_suite.seconds_of(with_mpirun, size), _suite.seconds_of(with_launch, size))
                for _ in range(options.times)
            ]
            theirs, ours = (statistics.median(side) for side in zip(*pairs, strict=True))
            print(f"{size:>6}{theirs:>10.2f}{ours:>10.2f}{ours - theirs:>8.2f}", flush=True)
            results.append({"ranks": size, "mpirun": theirs, "launch": ours})
    if options.save:
        _suite.save("mpi", {"times": options.times, "sizes": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
