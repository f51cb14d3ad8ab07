"""Rossmann's sales, the example whole: Tritium's KerasEstimator, tritium.compat's horovod.spark, and horovod.spark.

    .venv/bin/python benchmarks/rossmann.py [--stores 120] [--epochs 2] [--rounds 1] [--only NAME …] [--save]

Files are generated and the features prepared by Spark once (examples/rossmann; 1,115 stores are the real table, with
1,017,210 rows); then each system trains on those features: 18 embeddings, dense layers of 1000-1000-1000-500, the mean
absolute error of the logarithm of sales, Adam, batch 100 a rank, two ranks of one thread each, local[2].
horovod.spark needs Keras 2, hence TensorFlow 2.12, in an environment of its own; the others train on Keras 3 on JAX
(KERAS_BACKEND chooses another back end). Printed: median seconds with the spread, from the DataFrame in hand to the
model in hand, and the competition's error (RMSPE) of each model on the validation rows, computed alike for all. Goals:
at least twice as fast as horovod.spark, with the same error within 5 %.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import _suite

OURS, SHIM, THEIRS = "Tritium, KerasEstimator", "tritium.compat, horovod.spark", "horovod.spark"
SYSTEMS = {  # name -> environment, script
    OURS: ("tritium", "rossmann_tritium"),
    SHIM: ("tritium", "rossmann_horovod"),
    THEIRS: ("horovod-tensorflow", "rossmann_horovod"),
}

KEYS = ("seconds", "rmspe")


def of_horovod(systems: Mapping[str, Sequence[Mapping[str, Any]]], name: str) -> tuple[float | None, float | None]:
    """Return how many times as fast as horovod.spark a system is, and its error as a part of that one's."""
    seconds, errors = ({each: _suite.median(systems.get(each, ()), key) for each in (name, THEIRS)} for key in KEYS)
    return _suite.ratio(seconds[THEIRS], seconds[name]), _suite.ratio(errors[name], errors[THEIRS])


def report(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Print each system's seconds and error, and what both are of horovod.spark's."""
    for name, runs in found.items():
        seconds, error = _suite.spread(runs, "seconds"), _suite.median(runs, "rmspe")
        if seconds is None or error is None:
            print(f"{name:<30} failed")
            continue
        print(f"{name:<30} {seconds[0]:6.1f} s ({seconds[1]:.1f} to {seconds[2]:.1f})  RMSPE {error:.4f}", end="")
        faster, of_theirs = of_horovod(found, name)
        print("" if faster is None else f"  {faster:.2f} times as fast as horovod.spark, {of_theirs:.3f} of its error")


def main() -> int:
    parser = _suite.arguments(__doc__, SYSTEMS, rounds=1)
    parser.add_argument("--stores", type=int, default=120)
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()
    _suite.prepare(SYSTEMS[name][0] for name in options.only)
    with tempfile.TemporaryDirectory(prefix="rossmann-") as folder:
        rows = _suite.run("tritium", "rossmann_features", folder, "--stores", options.stores)
        print(f"{rows['read']:,} rows read, features in {rows['seconds']:.1f} s; {rows['trained']:,} to train on")
        sides = {name: partial(_suite.run, *SYSTEMS[name], folder, "--epochs", options.epochs) for name in options.only}
        found = _suite.in_turn(sides, dict.fromkeys(sides, options.rounds))
    report(found)
    if options.save:
        _suite.save("rossmann", {"epochs": options.epochs, "rows": rows, "systems": found})
    return _suite.failed(found)


if __name__ == "__main__":
    sys.exit(main())
