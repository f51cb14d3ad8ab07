"""A table with words, images and nulls: TorchEstimator that is given it as it is, and one for which Spark prepares it.

    .venv/bin/python benchmarks/real_tables.py [--rows 100000] [--epochs 2] [--rounds 3] [--save]

The rows (systems/tables.py) have a word of 1,000, a number that is null in every tenth row, and a JPEG of 48 × 48. By
hand: StringIndexer, `fillna` and an arrow_udf that decodes the images to arrays, then TorchEstimator on these columns.
Both train the same network on two ranks, from the DataFrame in hand to the model in hand, in turn. Goal: given as it
is, at most 1.1 × as long.
"""

from __future__ import annotations

import sys
from functools import partial

import _suite

BY_HAND, AS_IT_IS = "prepared in Spark by hand", "as it is"
SYSTEMS = {BY_HAND: "tables_by_hand", AS_IT_IS: "tables_as_is"}


def main() -> int:
    parser = _suite.arguments(__doc__, SYSTEMS, rounds=3)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()
    sides = {
        name: partial(_suite.run, "tritium", SYSTEMS[name], "--rows", options.rows, "--epochs", options.epochs)
        for name in options.only
    }
    found = _suite.in_turn(sides, dict.fromkeys(sides, options.rounds))
    by_hand = _suite.median(found.get(BY_HAND, []), "seconds")
    print(f"\n{'':<28}{'seconds':>9}{'least':>9}{'most':>9}{'ratio':>8}{'loss':>9}")
    for name, runs in found.items():
        seconds = _suite.spread(runs, "seconds")
        if seconds is None:
            print(f"{name:<28}  failed")
            continue
        ratio = f"{seconds[0] / by_hand:>8.2f}" if by_hand else ""
        print(f"{name:<28}{''.join(f'{s:>9.2f}' for s in seconds)}{ratio}{_suite.median(runs, 'loss'):>9.4f}")
    if options.save:
        _suite.save("real_tables", {"rows": options.rows, "epochs": options.epochs, "systems": found})
    return _suite.failed(found)


if __name__ == "__main__":
    sys.exit(main())
