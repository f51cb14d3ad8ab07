"""From a DataFrame in hand to a model in hand: Tritium, the ideal, and what a user would pick instead, side by side.

    .venv/bin/python benchmarks/train.py [--rows 1000000] [--epochs 3] [--rounds 5] [--only NAME …] [--memory] [--save]

The work is systems/work.py's: rows × 64 float32 made by a Spark transform, an MLP 64-256-256-1, Adam, batch 1024 a
rank, 2 ranks, one thread a rank, local[2]. Each system runs in a process and an environment of its own (made the first
time), in a session that has trained a few rows before; they take turns, `--rounds` times for Tritium, the ideal and the
three best peers, twice for the others. The machine is waited for until it is quiet. Printed: median seconds with the
spread, as multiples of the ideal, and the mean squared error of each model on rows of its own, which shows that all
have learned the same. `--memory` measures one more run of each system: the peak of the sum of PSS over its whole
process tree, with and without Spark's JVM (no times are taken of it: looking costs time). `--save` writes
benchmarks/results/train.json, or train_ideal.json where `--only` names no peer: what Tritium adds to the ideal is less
than the spread of a few rounds, so it is measured in more of them, without the peers.

    .venv/bin/python benchmarks/train.py --save --rounds 10 --only ideal "Tritium, TorchEstimator" "Tritium, launch"
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import _suite

# name -> environment, script, and whether it takes part in every round
SYSTEMS = {
    "ideal": ("tritium", "ideal", True),
    "Tritium, TorchEstimator": ("tritium", "tritium_estimator", True),
    "Tritium, launch": ("tritium", "tritium_launch", True),
    "TorchDistributor + Parquet": ("tritium", "torch_distributor", True),
    "spark-tensorflow-distributor": ("tensorflow", "tensorflow_distributor", True),
    "petastorm": ("petastorm", "petastorm_converter", True),
    "TorchDistributor, DataFrame": ("tritium", "torch_distributor_dataframe", False),
    "horovod.spark": ("horovod", "horovod_estimator", False),
    "Ray Data + Train": ("ray", "ray_train", False),
    "mosaicml-streaming": ("mosaic", "mosaic_streaming", False),
}
OTHERS = 2  # rounds of those that are far behind
OURS = ("Tritium, TorchEstimator", "Tritium, launch")


def main() -> int:
    parser = _suite.arguments(__doc__, SYSTEMS, rounds=5)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--memory", action="store_true")
    options = parser.parse_args()
    _suite.prepare(SYSTEMS[name][0] for name in options.only)
    sides, rounds = {}, {}
    for name in options.only:
        environment, script, often = SYSTEMS[name]
        work = ("--rows", options.rows, "--epochs", options.epochs)
        sides[name] = partial(_suite.run, environment, script, *work)
        rounds[name] = options.rounds if often else min(OTHERS, options.rounds)
    found = _suite.in_turn(sides, rounds)
    report(found)
    memory: dict[str, list[dict[str, Any]]] = {}
    if options.memory:
        real = {name: partial(side, memory=True) for name, side in sides.items() if name != "ideal"}
        memory = _suite.in_turn(real, dict.fromkeys(real, 1))
        for name, runs in memory.items():
            whole, own = (_suite.median(runs, key) or 0.0 for key in ("tree MB", "without the JVM MB"))
            print(f"{name:<30}{whole:>9.0f} MB, without Spark's JVM {own:>6.0f} MB", flush=True)
    if options.save:
        work = {"rows": options.rows, "epochs": options.epochs}
        peers = set(options.only) - {"ideal", *OURS}
        _suite.save("train" if peers else "train_ideal", {**work, "systems": found, "memory": memory})
    return _suite.failed(found)


def report(found: dict[str, list[dict[str, object]]]) -> None:
    ideal = _suite.median(found.get("ideal", []), "seconds")
    print(f"\n{'system':<30}{'seconds':>9}{'least':>9}{'most':>9}{'x ideal':>9}{'loop s':>9}{'mse':>10}{'runs':>6}")
    for name, runs in found.items():
        if (seconds := _suite.spread(runs, "seconds")) is None:
            print(f"{name:<30}  failed")
            continue
        loop, error = _suite.median(runs, "loop"), _suite.median(runs, "mse")
        numbers = "".join(f"{value:>9.2f}" for value in seconds)
        of_ideal = f"{seconds[0] / ideal:>9.2f}" if ideal else f"{'':>9}"
        print(f"{name:<30}{numbers}{of_ideal}{f'{loop:.2f}' if loop else '':>9}{error:>10.5f}{len(runs):>6}")


if __name__ == "__main__":
    sys.exit(main())
