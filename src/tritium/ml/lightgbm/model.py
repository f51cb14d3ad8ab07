"""`LightGBMModel`: a trained LightGBM booster as a Spark ML transformer (driver)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from tritium.ml.lightgbm.settings import BATCH_SIZE
from tritium.ml.model import TrainedModel
from tritium.model import files
from tritium.model.model import Model

if TYPE_CHECKING:
    import lightgbm


class LightGBMModel(TrainedModel):
    """A LightGBM booster that adds its predictions to a DataFrame: Spark's, batch or streaming, or one of pandas.

    A regressor and a ranker give a column `prediction` (double). A classifier gives `prediction` (the class index,
    double) and `probability` (an ml vector). Nulls in features are missing values, as in the training.
    """

    def __init__(self, model: Model, *, output_cols: Sequence[str] | None = None, **params: Any) -> None:
        """Wrap a model.

        params : any of the parameters, by name.
        """
        super().__init__(model, output_cols=output_cols, **{"batch_size": BATCH_SIZE, **params})

    def booster(self) -> lightgbm.Booster:
        """Return the booster itself, not a copy."""
        booster: lightgbm.Booster = self.model.module
        return booster

    def feature_importances(self, importance_type: Literal["split", "gain"] = "split") -> dict[str, float]:
        """Return feature → how often trees split by it ("split"), or by how much that improved them ("gain").

        Of one vector or array column `features`, the features are `features_0`, `features_1`, …, or have the names
        that VectorAssembler gave them.
        """
        names = [name for taken in self.signature.inputs for name in taken.names]
        importances = self.booster().feature_importance(importance_type)
        return dict(zip(names, map(float, importances), strict=True))

    def save_native(self, path: str) -> None:
        """Write LightGBM's own text, which `lightgbm.Booster(model_file=…)` reads, to a local path or an fsspec URL."""
        store, place, local = files.opened(path)
        files.put(store, local, place, self.model.engine.save(by_value=False).weights.stream())
