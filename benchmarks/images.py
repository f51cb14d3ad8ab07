"""JPEGs in a binary column as decoded batches: Tritium, decoding alone, petastorm and mosaicml-streaming, side by side.

    .venv/bin/python benchmarks/images.py [--images 20000] [--rounds 3] [--only NAME …] [--save]

20,000 JPEGs of 224 × 224 in Parquet; two ranks take one epoch of batches of 64, decoded by Pillow in every system.
Printed: seconds from the DataFrame in hand to the end of the epoch, and images a second in the loop alone. `--save`
writes benchmarks/results/images.json.
"""

from __future__ import annotations

import sys
import tempfile
from functools import partial

import _suite

SYSTEMS = {  # name -> environment, script
    "decoding alone": ("tritium", "images_ideal"),
    "Tritium": ("tritium", "images_tritium"),
    "petastorm": ("petastorm", "images_petastorm"),
    "mosaicml-streaming": ("mosaic", "images_mosaic"),
}


def main() -> int:
    parser = _suite.arguments(__doc__, SYSTEMS, rounds=3)
    parser.add_argument("--images", type=int, default=20_000)
    options = parser.parse_args()
    chosen = {name: SYSTEMS[name] for name in options.only}
    _suite.prepare(environment for environment, _ in chosen.values())
    with tempfile.TemporaryDirectory(prefix="tritium-bench-") as folder:
        _suite.run("tritium", "imaging", f"{folder}/images", options.images)
        sides = {
            name: partial(_suite.run, environment, script, "--folder", f"{folder}/images")
            for name, (environment, script) in chosen.items()
        }
        found = _suite.in_turn(sides, dict.fromkeys(sides, options.rounds))
    print(f"\n{'system':<24}{'seconds':>9}{'least':>8}{'most':>8}{'images/s in the loop':>22}{'sum':>16}")
    for name, runs in found.items():
        if (seconds := _suite.spread(runs, "seconds")) is None:
            print(f"{name:<24}  failed")
            continue
        rate = _suite.median(runs, "images") / _suite.median(runs, "loop")
        numbers = "".join(f"{value:>{width}.2f}" for value, width in zip(seconds, (9, 8, 8), strict=True))
        print(f"{name:<24}{numbers}{rate:>22,.0f}{_suite.median(runs, 'sum'):>16,.0f}")
    if options.save:
        _suite.save("images", {"images": options.images, "systems": found})
    return _suite.failed(found)


if __name__ == "__main__":
    sys.exit(main())
