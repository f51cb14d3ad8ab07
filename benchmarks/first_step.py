"""From the end of Spark's map stages to the first training step: shuffle="full" and "stream", few rows and many.

    .venv/bin/python benchmarks/first_step.py [--rows 1000000 8000000] [--rounds 3] [--save]

systems/first_step_tritium.py, in turn for each policy and number of rows. Printed: median seconds to the first step,
the import of torch in two processes at once and the time in which two tasks read the same shuffle, of the same runs.
Goals: "stream" within the import and one second, whatever the rows; "full" within that, or the reading if that takes
longer. `--save` writes benchmarks/results/first_step.json.
"""

from __future__ import annotations

import sys
from functools import partial

import _suite

POLICIES = ("stream", "full")


def main() -> int:
    parser = _suite.arguments(__doc__, POLICIES, rounds=3)
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000, 8_000_000])
    options = parser.parse_args()
    sides = {
        f"{policy}, {rows:,} rows": partial(
            _suite.run, "tritium", "first_step_tritium", "--rows", rows, "--shuffle", policy, limit=600
        )
        for rows in options.rows
        for policy in options.only
    }
    found = _suite.in_turn(sides, dict.fromkeys(sides, options.rounds))
    print(f"\n{'':<28}{'first step s':>13}{'import s':>10}{'read s':>9}{'goal s':>9}")
    for name, runs in found.items():
        step, imported, read = (_suite.median(runs, key) for key in ("seconds", "import", "read"))
        if step is None or imported is None or read is None:
            print(f"{name:<28}  failed")
        else:
            print(f"{name:<28}{step:>13.2f}{imported:>10.2f}{read:>9.2f}{goal(name, imported, read):>9.2f}")
    if options.save:
        _suite.save("first_step", {"systems": found})
    return _suite.failed(found)


def goal(name: str, imported: float, read: float) -> float:
    """Seconds within which the first step should be done."""
    return max(imported + 1, read if name.startswith("full") else 0.0)


if __name__ == "__main__":
    sys.exit(main())
