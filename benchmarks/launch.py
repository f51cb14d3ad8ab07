"""How long it takes to start two ranks: a function that does nothing, and one that forms a Gloo group, side by side.

    .venv/bin/python benchmarks/launch.py [--times 5] [--rounds 2] [--only NAME …] [--save]

Each system in a process and an environment of its own, in a warm session, `--rounds` times in turn; in each, the median
of `--times` launches. Beside them what importing torch in two processes at once takes in the same process: with a
process group, no launch can do without it. `--save` writes benchmarks/results/launch.json.
"""

from __future__ import annotations

import sys
from functools import partial

import _suite

# name -> environment, script, its arguments
SYSTEMS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "Tritium": ("tritium", "launch_tritium", ()),
    "Tritium, on the driver": ("tritium", "launch_tritium", ("driver",)),
    "TorchDistributor": ("tritium", "launch_torch_distributor", ()),
    "TorchDistributor, local mode": ("tritium", "launch_torch_distributor", ("local",)),
    "horovod.spark": ("horovod", "launch_horovod", ()),
    "Ray Train": ("ray", "launch_ray", ()),
}


def main() -> int:
    parser = _suite.arguments(__doc__, SYSTEMS, rounds=2)
    parser.add_argument("--times", type=int, default=5)
    options = parser.parse_args()
    chosen = {name: SYSTEMS[name] for name in options.only}
    _suite.prepare(environment for environment, *_ in chosen.values())
    sides = {
        name: partial(_suite.run, environment, script, *arguments, "--times", options.times)
        for name, (environment, script, arguments) in chosen.items()
    }
    found = _suite.in_turn(sides, dict.fromkeys(sides, options.rounds))
    print(f"\n{'system':<30}{'nothing s':>11}{'group s':>11}{'import of torch s':>19}")
    for name, runs in found.items():
        numbers = [_suite.median(runs, key) for key in ("nothing", "group", "import")]
        if None in numbers:
            print(f"{name:<30}  failed")
        else:
            print("{:<30}{:>11.2f}{:>11.2f}{:>19.2f}".format(name, *numbers))
    if options.save:
        _suite.save("launch", {"times": options.times, "systems": found})
    return _suite.failed(found)


if __name__ == "__main__":
    sys.exit(main())
