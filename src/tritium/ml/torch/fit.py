"""`fit`: train a PyTorch module without Spark ML (driver)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tritium.gang.settings import Gang, showing
from tritium.ml.fitting import combined, prepare, run
from tritium.ml.torch.backend import TorchBackend
from tritium.ml.torch.settings import TorchSettings
from tritium.model.model import Model

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from tritium.ml.torch.keywords import TorchKeywords


@showing(TorchSettings, Gang)
def fit(
    frame: Any,
    settings: TorchSettings | None = None,
    gang: Gang | None = None,
    *,
    spark: Any = None,
    **fields: Unpack[TorchKeywords],
) -> Model:
    """Train on a Spark DataFrame, or with `on="driver"` and `on="here"` on a pandas DataFrame or a pyarrow Table.

    The fields of TorchSettings and of Gang can be given directly as keywords. The model that is returned is
    independent of Spark; `TorchEstimator.fit` wraps it as a Spark ML transformer.

    Raises SetupError before anything has started, DataError for what only the rows could show, TrainingDiverged for a
    loss or gradients that are NaN or infinite, RankFailed for an exception in a rank.
    """
    ranks_given = gang is not None or "ranks" in fields
    settings, gang = combined(TorchSettings, settings, gang, fields)
    return run(prepare(TorchBackend(), frame, settings, gang), spark=spark, ranks_given=ranks_given)
