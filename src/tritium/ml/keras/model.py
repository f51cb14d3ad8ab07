"""`KerasModel`: a trained Keras model as a Spark ML transformer (driver)."""

from __future__ import annotations

from typing import Any

from tritium.ml.model import TrainedModel


class KerasModel(TrainedModel):
    """A Keras model that adds its predictions to a DataFrame: Spark's, batch or streaming, or one of pandas.

    One number per row is a column `prediction` (double). A classification is `prediction` (the class index, double) and
    `probability` (an ml vector). Anything else is an array, several outputs a struct, in `prediction`.
    """

    def keras(self) -> Any:
        """Return the keras.Model itself, not a copy: `model.keras().save("model.keras")`."""
        return self.model.module
