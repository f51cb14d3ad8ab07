"""Trainings of a CrossValidator, in threads of its own, are heard by who listens where it was called."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas as pd
import pytest
import torch

import tritium as tr
from tritium.events import Event, RunOpened
from tritium.ml import TorchEstimator


@pytest.mark.processes
def test_trainings_in_threads(tmp_path: Path) -> None:
    frame = pd.DataFrame({"x": [0.1 * i for i in range(20)], "y": [0.2 * i for i in range(20)]})
    estimator = TorchEstimator(
        model=torch.nn.Linear(1, 1),
        loss=torch.nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        feature_cols=["x"],
        label_cols=["y"],
        on="driver",
        progress=False,
        run_dir=str(tmp_path),
    )
    events: list[Event] = []
    with tr.listen(events.append), ThreadPoolExecutor() as threads:
        trainings = estimator.fitMultiple(frame, [{estimator.epochs: number} for number in (2, 3)])  # type: ignore[attr-defined]
        assert [threads.submit(next, trainings).result()[0] for _ in range(2)] == [0, 1]
    opened = [event.settings for event in events if isinstance(event, RunOpened)]
    assert [settings["training"]["epochs"] for settings in opened] == ["2", "3"]
