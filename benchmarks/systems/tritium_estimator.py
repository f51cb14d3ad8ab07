"""Tritium's TorchEstimator."""

from __future__ import annotations

import sys
from typing import Any

import work


def fit(frame: Any, epochs: int) -> work.Fitted:
    import torch

    from tritium.ml import TorchEstimator

    model = TorchEstimator(
        model=work.make_net,
        loss=torch.nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=work.RATE),
        feature_cols=work.FEATURES,
        label_cols=[work.LABEL],
        batch_size=work.BATCH,
        epochs=epochs,
        ranks=work.RANKS,
        progress=False,
        verbose=False,
    ).fit(frame)
    loop, rows = (sum(epoch[name] for epoch in model.history) for name in ("seconds", "rows"))
    return work.Fitted(work.layers_of(model.module()), loop, rows, {})


if __name__ == "__main__":
    sys.exit(work.main(fit, "torch", "pyarrow"))
