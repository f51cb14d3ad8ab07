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
    """Return the facts that must be equal for a training to continue: its module, columns and settings."""
    return identity_of(settings, fields) | weights_identity(module)


def identity_with_code(settings: LightningSettings, module: Any, fields: Iterable[Field]) -> dict[str, Any]:
    """Return the driver's description of a training: `identity`, the rows to validate on, and hashes of code."""
    facts = module_identity(identity(settings, module, fields), settings, module, {})
    return {**facts, "versions": {**facts["versions"], "Lightning": str(lightning.__version__)}}
