"""`FunctionEstimator`: the user's own training function as a Spark ML Estimator (driver)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from tritium.gang.settings import Gang, showing
from tritium.ml.estimator import GangEstimator
from tritium.ml.function.settings import FunctionSettings
from tritium.ml.params import with_params
from tritium.ml.settings import Settings

if TYPE_CHECKING:
    from typing_extensions import Unpack  # Only type checkers need it, and they bring it along.

    from tritium.ml.function.backend import FunctionBackend
    from tritium.ml.function.keywords import FunctionKeywords, FunctionParams
    from tritium.ml.function.model import FunctionModel
    from tritium.model.model import Model
else:
    FunctionParams = object  # For type checkers it declares the Params that the decorator makes.


@with_params(FunctionSettings, Gang)
class FunctionEstimator(GangEstimator, FunctionParams):
    """An estimator that trains by a function of your own, on the ranks of a gang: JAX, scikit-learn, NumPy, anything.

    Every field of `FunctionSettings` and of `Gang` is a keyword and a Param of the same name. `framework=` connects the
    ranks, as in `tr.launch`. `fit` returns a `FunctionModel`. With `on="driver"` and `on="here"`, `fit` takes a pandas
    DataFrame or a pyarrow Table.
    """

    kind: ClassVar[type[Settings]] = FunctionSettings

    @showing(FunctionSettings, Gang)
    def __init__(self, *, gang: Gang | None = None, **keywords: Unpack[FunctionKeywords]) -> None:
        super().__init__()
        self._start(gang, keywords)

    def _backend(self) -> FunctionBackend:
        from tritium.ml.function.backend import FunctionBackend

        return FunctionBackend()

    def _model(self, model: Model) -> FunctionModel:
        from tritium.ml.function.model import FunctionModel

        return FunctionModel(model)
