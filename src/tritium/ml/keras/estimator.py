"""`KerasEstimator`: Keras 3 on a Spark DataFrame as a Spark ML Estimator (driver)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from tritium.gang.settings import Gang, showing
from tritium.ml.estimator import GangEstimator
from tritium.ml.keras.settings import KerasSettings
from tritium.ml.params import with_params
from tritium.ml.settings import Settings

if TYPE_CHECKING:
    from typing_extensions import Unpack  # Only type checkers need it, and they bring it along.

    from tritium.ml.keras.backend import KerasBackend
    from tritium.ml.keras.keywords import KerasKeywords, KerasParams
    from tritium.ml.keras.model import KerasModel
    from tritium.model.model import Model
else:
    KerasParams = object  # For type checkers it declares the Params that the decorator makes.


@with_params(KerasSettings, Gang)
class KerasEstimator(GangEstimator, KerasParams):
    """An estimator that trains a Keras 3 model on a Spark DataFrame, on the ranks of a gang on the same cluster.

    Every field of `KerasSettings` and of `Gang` is a keyword and a Param of the same name: `est.batch_size` in a
    ParamGridBuilder, `est.getBatchSize()`, `est.explainParams()`. `gang=` gives all fields of a Gang at once; a field
    given beside it overrides it. `fit` returns a `KerasModel`. With `on="driver"` and `on="here"`, `fit` takes a pandas
    DataFrame or a pyarrow Table.
    """

    kind: ClassVar[type[Settings]] = KerasSettings

    @showing(KerasSettings, Gang)
    def __init__(self, *, gang: Gang | None = None, **keywords: Unpack[KerasKeywords]) -> None:
        super().__init__()
        self._start(gang, keywords)

    def _backend(self) -> KerasBackend:
        from tritium.model.engines.keras_here import imported

        # First, as the modules below import Keras, which then keeps its back end.
        imported(self.getOrDefault("backend"))
        from tritium.ml.keras.backend import KerasBackend

        return KerasBackend()

    def _model(self, model: Model) -> KerasModel:
        from tritium.ml.keras.model import KerasModel

        return KerasModel(model)
