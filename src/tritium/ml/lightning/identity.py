"""The identity of a training with Lightning, so that no other continues from its checkpoints (driver, rank)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import lightning

from tritium.checkpoint.identity import identity_of
from tritium.data.schema import Field
from tritium.ml.lightning.settings import LightningSettings
from tritium.ml.torch.identity import module_identity, weights_identity


def identity(settings: LightningSettings, module: Any, fields: Iterable[Field]) -> dict[str, Any]:
    """Return what must be equal for a training to continue: what is trained, on which columns, with which settings."""
    return identity_of(settings, fields) | weights_identity(module)


def identity_with_code(settings: LightningSettings, module: Any, fields: Iterable[Field]) -> dict[str, Any]:
    """Return what the driver knows of a training: `identity`, the rows to validate on, and hashes of code."""
    found = module_identity(identity(settings, module, fields), settings, module, {})
    return {**found, "versions": {**found["versions"], "Lightning": str(lightning.__version__)}}
