"""Rows scored per second on two cores: Tritium, the ideal, and what a user would pick instead, side by side.

    .venv/bin/python benchmarks/inference.py [--rows 2000000] [--rounds 3] [--times 3] [--only NAME …] [--save]

An MLP 64-256-256-1 over Parquet rows of an id, a text and 64 float32 (one array column, where a system can take one),
`local[2]`, the other columns kept, the result into nothing. Each system in a process and an environment of its own,
`--rounds` times in turn; in each, the median of `--times` passes after a first. The mean prediction shows that all have
computed the same. `--save` writes benchmarks/results/inference.json.
"""

from __future__ import annotations

import sys
import tempfile
from functools import partial

import _suite

SYSTEMS = {  # name -> environment, script
    "ideal": ("tritium", "score_ideal"),
    "Tritium": ("tritium", "score_tritium"),
    "predict_batch_udf": ("tritium", "score_batch_udf"),
    "mapInPandas": ("tritium", "score_map_in_pandas"),
    "MLflow spark_udf": ("mlflow", "score_mlflow"),
    "Ray Data map_batches": ("ray", "score_ray"),
}


def main() -> int:
    parser = _suite.arguments(__doc__, SYSTEMS, rounds=3)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--times", type=int, default=3)
    options = parser.parse_args()
    chosen = {name: SYSTEMS[name] for name in options.only}
    _suite.prepare(environment for environment, _ in chosen.values())
    with tempfile.TemporaryDirectory(prefix="tritium-bench-") as folder:
        _suite.run("tritium", "scoring", f"{folder}/rows", options.rows)
        settings = ("--folder", f"{folder}/rows", "--times", options.times)
        sides = {
            name: partial(_suite.run, environment, script, *settings) for name, (environment, script) in chosen.items()
        }
        found = _suite.in_turn(sides, dict.fromkeys(sides, options.rounds))
    ours = _suite.median(found.get("Tritium", []), "seconds")
    print(f"\n{'system':<24}{'rows/s':>12}{'seconds':>9}{'least':>8}{'most':>8}{'Tritium is':>12}{'mean':>12}")
    for name, runs in found.items():
        if (seconds := _suite.spread(runs, "seconds")) is None:
            print(f"{name:<24}  failed")
            continue
        mean = _suite.median(runs, "mean")
        times = f"{seconds[0] / ours:.2f} x" if ours else ""
        shown = "" if mean is None else f"{mean:.6f}"
        numbers = "".join(f"{value:>{width}.2f}" for value, width in zip(seconds, (9, 8, 8), strict=True))
        print(f"{name:<24}{options.rows / seconds[0]:>12,.0f}{numbers}{times:>12}{shown:>12}")
    if options.save:
        _suite.save("inference", {"rows": options.rows, "systems": found})
    return _suite.failed(found)


if __name__ == "__main__":
    sys.exit(main())
