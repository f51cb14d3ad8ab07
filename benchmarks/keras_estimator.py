"""From a DataFrame in hand to a model in hand with Keras: KerasEstimator, the ideal, and what else there is.

    .venv/bin/python benchmarks/keras_estimator.py [--rows 1000000] [--epochs 3] [--rounds 3] [--only NAME …] [--save]

The work is that of train.py, with the network in Keras: rows × 64 float32 made by a Spark transform, Adam, batch 1024 a
rank, two ranks of one thread each, local[2]. The ideal is the transform with a shuffle, importing Keras in two
processes, and `fit` of two processes that average their gradients, over tensors in RAM. horovod.spark's KerasEstimator
needs Keras 2, hence TensorFlow 2.12, in an environment of its own; the others train on Keras's torch back end
(KERAS_BACKEND chooses another one, for which there is no ideal: leave it out by `--only`). Plain Keras gets the rows by
`toArrow`, which needs them in the memory of one machine, and takes batches of both ranks' rows with two threads.
Printed: median seconds with the spread, as multiples of the ideal, and the mean squared error of each model. Goals: at
most 1.15 times the ideal, and at least twice as fast as horovod.spark.
"""

from __future__ import annotations

import sys
from functools import partial

import _suite
import train

OURS = "Tritium, KerasEstimator"
SYSTEMS = {  # name -> environment, script
    "ideal": ("tritium", "keras_ideal"),
    OURS: ("tritium", "keras_tritium"),
    "plain Keras, one process": ("tritium", "keras_alone"),
    "horovod.spark": ("horovod-tensorflow", "horovod_keras"),
}


def main() -> int:
    parser = _suite.arguments(__doc__, SYSTEMS, rounds=3)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    work = ("--rows", options.rows, "--epochs", options.epochs)
    _suite.prepare(SYSTEMS[name][0] for name in options.only)
    sides = {name: partial(_suite.run, *SYSTEMS[name], *work) for name in options.only}
    found = _suite.in_turn(sides, dict.fromkeys(sides, options.rounds))
    train.report(found)
    if options.save:
        _suite.save("keras", {"rows": options.rows, "epochs": options.epochs, "systems": found})
    return _suite.failed(found)


if __name__ == "__main__":
    sys.exit(main())
