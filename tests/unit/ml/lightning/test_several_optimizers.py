"""The GAN of docs/several-optimizers.md: two ranks learn what one does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import advice
from tritium.ml import LightningEstimator

PAGE = Path(__file__).parents[4] / "docs" / "several-optimizers.md"


@pytest.mark.processes
@pytest.mark.timeout(400)
def test_two_ranks_learn_what_one_does() -> None:
    ((_, program),) = advice.blocks(PAGE, "python")
    assert len([line for line in program.splitlines() if line.strip()]) <= 40
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(program.partition("model = estimator.fit")[0], names)
    estimator: LightningEstimator = names["estimator"].setShuffle(False).setProgress(False).setVerbose(False)
    rows = names["train_df"][:400]
    one = estimator.setRanks(1).setBatchSize(100).fit(rows)
    two = estimator.setRanks(2).setBatchSize(50).fit(rows)
    predictions = [model.predict(rows) for model in (one, two)]
    np.testing.assert_allclose(*predictions, atol=1e-5)
    for name in ("critic_loss", "generator_loss"):
        assert two.history[-1][name] == pytest.approx(one.history[-1][name], rel=1e-4)
