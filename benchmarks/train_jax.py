"""From a DataFrame in hand to a model in hand with JAX: `launch` against what no system can avoid, side by side.

    .venv/bin/python benchmarks/train_jax.py [--rows 1000000] [--epochs 3] [--rounds 3] [--save]

The work is that of train.py: rows × 64 float32 made by a Spark transform, an MLP 64-256-256-1, Adam, batch 1024 a rank,
2 ranks, local[2]. The ideal is the transform with a shuffle, importing JAX in two processes, and the same loop over
arrays in RAM. Goal: at most 1.10 times the ideal.
"""

from __future__ import annotations

import sys
from functools import partial

import _suite
import train

OURS = "Tritium, launch"
SYSTEMS = {"ideal": "jax_ideal", OURS: "jax_launch"}


def main() -> int:
    parser = _suite.arguments(__doc__, SYSTEMS, rounds=3)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    sides = {
        name: partial(_suite.run, "tritium", SYSTEMS[name], "--rows", options.rows, "--epochs", options.epochs)
        for name in options.only
    }
    found = _suite.in_turn(sides, dict.fromkeys(sides, options.rounds))
    train.report(found)
    if options.save:
        _suite.save("train_jax", {"rows": options.rows, "epochs": options.epochs, "systems": found})
    return _suite.failed(found)


if __name__ == "__main__":
    sys.exit(main())
