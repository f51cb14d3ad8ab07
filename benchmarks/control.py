"""The control connections: how long a gather takes, and how much passes through.

    python benchmarks/control.py [ranks …]

Ranks, supervisors and coordinator are on this machine (`on="driver"`), so all share its cores.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time

import tritium as tr

CHUNK = 4 << 20


def measure() -> tuple[float, float, float, float]:
    """Milliseconds for a small gather, and for one of 4 MB a rank; MB/s of a stored file; logs a second."""
    world = tr.world()
    small = []
    for number in range(300):
        began = time.perf_counter()
        world.gather(number)
        small.append(time.perf_counter() - began)
    large, chunk = [], bytes(CHUNK)
    for _ in range(5):
        began = time.perf_counter()
        world.gather(chunk)
        large.append(time.perf_counter() - began)
    began = time.perf_counter()
    if world.rank == 0:
        world.store("file", (chunk for _ in range(32)))
    world.barrier()
    stored = time.perf_counter() - began
    began = time.perf_counter()
    for number in range(2000):
        world.log(x=number)
    world.barrier()
    logged = time.perf_counter() - began
    return (
        statistics.median(small) * 1e3,
        statistics.median(large) * 1e3,
        32 * CHUNK / stored / 1e6,
        2000 * world.size / logged,
    )


def main(sizes: list[int]) -> None:
    """One line for each number of ranks."""
    for ranks in sizes:
        place = tempfile.mkdtemp()
        numbers = tr.launch(measure, ranks=ranks, on="driver", run_dir=place, progress=False, output="none")[0]
        shutil.rmtree(place)
        print(
            "{} ranks: gather {:.2f} ms, gather of 4 MB a rank {:.0f} ms, a file {:.0f} MB/s, {:,.0f} logs/s".format(
                ranks, *numbers
            ),
            flush=True,
        )


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or [2, 8])
