"""`LightGBMClassifier`, `LightGBMRegressor` and `LightGBMRanker`: Spark ML Estimators (driver)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from tritium.gang.settings import Gang, showing
from tritium.ml.estimator import GangEstimator
from tritium.ml.lightgbm.settings import (
    LightGBMClassifierSettings,
    LightGBMRankerSettings,
    LightGBMRegressorSettings,
)
from tritium.ml.params import with_params
from tritium.ml.settings import Settings

if TYPE_CHECKING:
    from typing_extensions import Unpack  # Only type checkers need it, and they bring it along.

    from tritium.ml.lightgbm.backend import LightGBMBackend
    from tritium.ml.lightgbm.keywords import (
        LightGBMClassifierKeywords,
        LightGBMClassifierParams,
        LightGBMRankerKeywords,
        LightGBMRankerParams,
        LightGBMRegressorKeywords,
        LightGBMRegressorParams,
    )
    from tritium.ml.lightgbm.model import LightGBMModel
    from tritium.model.model import Model
else:  # For type checkers they declare the Params that the decorator makes.
    LightGBMClassifierParams = LightGBMRegressorParams = LightGBMRankerParams = object


class LightGBMEstimator(GangEstimator):
    """The base of the three estimators. `fit` returns a `LightGBMModel`.

    Every field of the settings and of `Gang` is a keyword and a Param of the same name: `est.num_leaves` in a
    ParamGridBuilder, `est.getNumLeaves()`, `est.explainParams()`. `gang=` gives all fields of a Gang at once; a field
    given beside it overrides it. With `on="driver"` and `on="here"`, `fit` takes a pandas DataFrame or a pyarrow Table.
    """

    def _backend(self) -> LightGBMBackend:
        from tritium.ml.lightgbm.backend import LightGBMBackend

        return LightGBMBackend()

    def _model(self, model: Model) -> LightGBMModel:
        from tritium.ml.lightgbm.model import LightGBMModel

        return LightGBMModel(model)


@with_params(LightGBMClassifierSettings, Gang)
class LightGBMClassifier(LightGBMEstimator, LightGBMClassifierParams):
    """An estimator that trains LightGBM on a Spark DataFrame to tell classes apart.

    Its settings are those of `LightGBMClassifierSettings` and of `Gang`. The model gives the class index and the
    probability of each class.
    """

    kind: ClassVar[type[Settings]] = LightGBMClassifierSettings

    @showing(LightGBMClassifierSettings, Gang)
    def __init__(self, *, gang: Gang | None = None, **keywords: Unpack[LightGBMClassifierKeywords]) -> None:
        super().__init__()
        self._start(gang, keywords)


@with_params(LightGBMRegressorSettings, Gang)
class LightGBMRegressor(LightGBMEstimator, LightGBMRegressorParams):
    """An estimator that trains LightGBM on a Spark DataFrame to predict a number.

    Its settings are those of `LightGBMRegressorSettings` and of `Gang`.
    """

    kind: ClassVar[type[Settings]] = LightGBMRegressorSettings

    @showing(LightGBMRegressorSettings, Gang)
    def __init__(self, *, gang: Gang | None = None, **keywords: Unpack[LightGBMRegressorKeywords]) -> None:
        super().__init__()
        self._start(gang, keywords)


@with_params(LightGBMRankerSettings, Gang)
class LightGBMRanker(LightGBMEstimator, LightGBMRankerParams):
    """An estimator that trains LightGBM on a Spark DataFrame to rank the rows of each group.

    Its settings are those of `LightGBMRankerSettings` and of `Gang`. The model gives a score: the larger, the earlier.
    """

    kind: ClassVar[type[Settings]] = LightGBMRankerSettings

    @showing(LightGBMRankerSettings, Gang)
    def __init__(self, *, gang: Gang | None = None, **keywords: Unpack[LightGBMRankerKeywords]) -> None:
        super().__init__()
        self._start(gang, keywords)
