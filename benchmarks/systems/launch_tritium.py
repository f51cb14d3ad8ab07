"""tr.launch on the two tasks of local[2]; `launch_tritium.py driver`: on="driver", without Spark."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import launching
import work


def on_spark(function: Callable[[], int]) -> Any:
    import tritium as tr

    return tr.launch(
        function, ranks=work.RANKS, framework="torch" if function is launching.group else None, progress=False
    )[0]


def on_driver(function: Callable[[], int]) -> Any:
    import tritium as tr

    return tr.launch(function, ranks=work.RANKS, on="driver", progress=False)[0]


if __name__ == "__main__":
    if "driver" in sys.argv:
        sys.argv.remove("driver")
        sys.exit(launching.main(on_driver, "torch"))
    work.prepare()
    work.session()
    sys.exit(launching.main(on_spark, "pyspark", "torch"))
