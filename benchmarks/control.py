"""The control connections: how long a gather takes, and how much passes through; in the clear and under TLS, in turn.

    .venv/bin/python benchmarks/control.py [ranks …] [--rounds 5] [--save]

Ranks, supervisors and coordinator are on this machine (`on="driver"`), so all share its cores. Printed are the medians
of the rounds, and of the time that each takes under TLS, as a multiple of its time in the same round without. Goal: at
most 1.1. `--save` writes benchmarks/results/control.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import _suite

import tritium as tr

CHUNK = 4 << 20
MEASURED = ("a gather", "a gather of 4 MB a rank", "a stored file", "logs")
UNITS = ("ms", "ms", "MB/s", "a second")
FORMS = ("{:.2f}", "{:.0f}", "{:.0f}", "{:,.0f}")
TIMES = ("{:.2f}",) * 4


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


def in_round(ranks: int, tls: bool) -> tuple[float, float, float, float]:
    with tempfile.TemporaryDirectory(prefix="tritium-bench-runs-") as place:
        settings: dict[str, Any] = {"ranks": ranks, "on": "driver", "run_dir": place, "tls": tls}
        return tr.launch(measure, progress=False, output="none", **settings)[0]


def times(plain: Sequence[float], tls: Sequence[float]) -> list[float]:
    """Return the times under TLS as multiples of those without; of the last two measures there are rates."""
    return [tls[0] / plain[0], tls[1] / plain[1], plain[2] / tls[2], plain[3] / tls[3]]


def main() -> int:
    """A line for each number of ranks, and for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ranks", type=int, nargs="*", default=[2, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    found: dict[int, dict[str, list[float]]] = {}
    for ranks in options.ranks:
        _suite.quiet()
        rounds = []
        for number in range(options.rounds):
            first = in_round(ranks, bool(number % 2))
            second = in_round(ranks, not number % 2)
            rounds.append((second, first) if number % 2 else (first, second))
        sides: dict[str, list[Any]] = {"plain": [plain for plain, _ in rounds], "TLS": [tls for _, tls in rounds]}
        sides["ratio"] = [times(plain, tls) for plain, tls in rounds]
        found[ranks] = {name: list(map(statistics.median, zip(*side, strict=True))) for name, side in sides.items()}
        for name, row in found[ranks].items():
            units, forms = (("×",) * 4, TIMES) if name == "ratio" else (UNITS, FORMS)
            cells = zip(MEASURED, forms, row, units, strict=True)
            line = ", ".join(f"{what} {form.format(value)} {unit}" for what, form, value, unit in cells)
            print(f"{ranks} ranks, {name}: {line}", flush=True)
    if options.save:
        _suite.save("control", {"rounds": options.rounds, "ranks": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
