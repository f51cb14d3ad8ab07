"""`FunctionModel`: a state with a function that predicts, as a Spark ML transformer (driver)."""

from __future__ import annotations

from typing import Any

from tritium.ml.model import TrainedModel


class FunctionModel(TrainedModel):
    """A trained state that adds its predictions to a DataFrame: Spark's, batch or streaming, or one of pandas."""

    def state(self) -> Any:
        """Return the state itself, not a copy."""
        return self.model.module.state
