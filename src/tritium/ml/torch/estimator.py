"""`TorchEstimator`: PyTorch on a Spark DataFrame as a Spark ML Estimator (driver)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from tritium.gang.settings import Gang, showing
from tritium.ml.estimator import GangEstimator
from tritium.ml.params import with_params
from tritium.ml.settings import Settings
from tritium.ml.torch.settings import TorchSettings

if TYPE_CHECKING:
    from typing_extensions import Unpack  # Only type checkers need it, and they bring it along.

    from tritium.ml.torch.backend import TorchBackend
    from tritium.ml.torch.keywords import TorchKeywords, TorchParams
    from tritium.ml.torch.model import TorchModel
    from tritium.model.model import Model
else:
    TorchParams = object  # For type checkers it declares the Params that the decorator makes.


@with_params(TorchSettings, Gang)
class TorchEstimator(GangEstimator, TorchParams):
    """An estimator that trains a PyTorch module on a Spark DataFrame, on the ranks of a gang on the same cluster.

    Every field of `TorchSettings` and of `Gang` is a keyword and a Param of the same name: `est.batch_size` in a
    ParamGridBuilder, `est.getBatchSize()`, `est.explainParams()`. `gang=` gives all fields of a Gang at once; a field
    given beside it overrides it. `fit` returns a `TorchModel`. With `on="driver"` and `on="here"`, `fit` takes a pandas
    DataFrame or a pyarrow Table.
    """

    kind: ClassVar[type[Settings]] = TorchSettings

    @showing(TorchSettings, Gang)
    def __init__(self, *, gang: Gang | None = None, **keywords: Unpack[TorchKeywords]) -> None:
        super().__init__()
        self._start(gang, keywords)

    def _backend(self) -> TorchBackend:
        from tritium.ml.torch.backend import TorchBackend

        return TorchBackend()

    def _model(self, model: Model) -> TorchModel:
        from tritium.ml.torch.model import TorchModel

        return TorchModel(model)
