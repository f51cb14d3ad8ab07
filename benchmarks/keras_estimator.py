"""From a DataFrame in hand to a model in hand with Keras: KerasEstimator against plain Keras, one process.

    .venv/bin/python benchmarks/keras_estimator.py [--rows 1000000] [--epochs 3] [--rounds 3] [--save]

The work is that of train.py, with the network in Keras, on the torch back end
(KERAS_BACKEND chooses another one) and two ranks. Plain Keras gets the rows by `toArrow`, which needs them in the
memory of one machine, and one process takes batches of both ranks' rows with all cores.
"""

from __future__ import annotations

import sys
from functools import partial

import _suite
import train

SYSTEMS = {"plain Keras, one process": "keras_alone", "Tritium, KerasEstimator": "keras_tritium"}


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
        _suite.save("keras", {"rows": options.rows, "epochs": options.epochs, "systems": found})
    return _suite.failed(found)


if __name__ == "__main__":
    sys.exit(main())
