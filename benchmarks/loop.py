"""The training loop alone, epoch by epoch: over a shard that is complete, over one that still arrives, and over RAM.

    .venv/bin/python benchmarks/loop.py [--rows 1000000] [--epochs 3] [--rounds 3] [--save]

systems/ideal.py and systems/tritium_launch.py with shuffle="full" and "stream", in turn. Printed: median seconds of the
first epoch and of a later one, and the share of the speed over tensors in RAM. With "stream", Spark still reads during
the first epoch: on a machine with no more cores than ranks they share those. `--save` writes
benchmarks/results/loop.json.
"""

from __future__ import annotations

import sys
from functools import partial

import _suite

SYSTEMS = {"in RAM": ("ideal", ()), "full": ("tritium_launch", ()), "stream": ("tritium_launch", ("stream",))}
EPOCHS = ("first epoch", "later epochs")


def main() -> int:
    parser = _suite.arguments(__doc__, SYSTEMS, rounds=3)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    work = ("--rows", options.rows, "--epochs", options.epochs)
    sides = {
        name: partial(_suite.run, "tritium", script, *arguments, *work)
        for name, (script, arguments) in SYSTEMS.items()
        if name in options.only
    }
    found = _suite.in_turn(sides, dict.fromkeys(sides, options.rounds))
    for runs in found.values():
        for one in runs:
            one.update(one.pop("parts", {}))
    print(f"\n{'rows from':<12}" + "".join(f"{epoch + ' s':>18}{'of RAM':>9}" for epoch in EPOCHS))
    for name, runs in found.items():
        cells = ""
        for epoch in EPOCHS:
            seconds, base = _suite.median(runs, epoch), _suite.median(found.get("in RAM", []), epoch)
            cells += "failed" if seconds is None else f"{seconds:>18.2f}" + (f"{base / seconds:>9.2f}" if base else "")
        print(f"{name:<12}{cells}")
    if options.save:
        _suite.save("loop", {"systems": found})
    return _suite.failed(found)


if __name__ == "__main__":
    sys.exit(main())
