"""From a DataFrame in hand to trees in hand: LightGBMRegressor, what no system can avoid, and what else there is.

    .venv/bin/python benchmarks/trees.py [--rows 1000000] [--iterations 100] [--rounds 3] [--only NAME …] [--save]

Rows × 64 float32 made by a Spark transform (systems/work.py), 31 leaves, 255 bins, local[2]. The ideal is the transform
with a shuffle, importing LightGBM in two processes, and LightGBM's own distributed training of two processes over
arrays in RAM, one thread each. "LightGBM alone" collects the rows to the driver and trains there with two threads.
SynapseML runs on pyspark 3.5, in an environment of its own; Spark gets its jars from Maven at the first run. Printed:
median seconds with the spread, as multiples of the ideal, and the mean squared error of each model. Goals: at most 1.15
times the ideal, and faster than SynapseML.
"""

from __future__ import annotations

import sys
from functools import partial

import _suite
import train

OURS = "Tritium, LightGBMRegressor"
SYSTEMS = {  # name -> environment, script
    "ideal": ("tritium", "trees_ideal"),
    OURS: ("tritium", "trees_tritium"),
    "LightGBM alone": ("tritium", "trees_alone"),
    "xgboost.spark": ("tritium", "trees_xgboost"),
    "SynapseML": ("synapseml", "trees_synapseml"),
}


def main() -> int:
    parser = _suite.arguments(__doc__, SYSTEMS, rounds=3)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--iterations", type=int, default=100)
    options = parser.parse_args()
    work = ("--rows", options.rows, "--iterations", options.iterations)
    _suite.prepare(SYSTEMS[name][0] for name in options.only)
    sides = {name: partial(_suite.run, *SYSTEMS[name], *work) for name in options.only}
    found = _suite.in_turn(sides, dict.fromkeys(sides, options.rounds))
    train.report(found)
    if options.save:
        _suite.save("trees", {"rows": options.rows, "iterations": options.iterations, "systems": found})
    return _suite.failed(found)


if __name__ == "__main__":
    sys.exit(main())
