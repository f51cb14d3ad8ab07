"""TorchEstimator on the table as it is."""

from __future__ import annotations

import sys
from typing import Any

import tables


def fit(frame: Any, epochs: int) -> Any:
    from tritium.ml import TorchEstimator

    return TorchEstimator(
        model=lambda vocabulary: tables.make_net(len(vocabulary["word"])),
        feature_cols={"word": "word", "number": ["number"], "image": "image"},
        vocabulary=["word"],
        nulls={"number": 0.0},
        decode={"image": tables.decode},
        **tables.settings(epochs),
    ).fit(frame)


if __name__ == "__main__":
    sys.exit(tables.main(fit))
