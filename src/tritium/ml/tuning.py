"""The title of a training among those of Spark's CrossValidator (driver)."""

from __future__ import annotations

import sys
from typing import Any


def fold() -> str:
    """Return which part of a CrossValidator's fit calls this: "fold 2/3", "best" (the last fit, on all rows), else "".

    Spark does not tell an estimator: it is read from the local variables of `CrossValidator._fit`, and is "" where
    another version of Spark names them otherwise.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_fit" and frame.f_globals.get("__name__") == "pyspark.ml.tuning":
            known = frame.f_locals
            if "bestIndex" in known:
                return "best"
            number, folds = known.get("i"), known.get("nFolds")
            return f"fold {number + 1}/{folds}" if isinstance(number, int) and isinstance(folds, int) else ""
        frame = frame.f_back
    return ""
