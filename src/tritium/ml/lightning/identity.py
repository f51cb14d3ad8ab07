"""The identity of a training with Lightning, so that no other continues from its checkpoints (driver, rank)."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import Any

import lightning
import torch

from tritium.arguments import name_of
from tritium.checkpoint.code import is_own
from tritium.checkpoint.identity import HELD, identity_of, rows_of
from tritium.data.schema import Field
from tritium.ml.lightning.settings import LightningSettings
from tritium.ml.torch.digest import TorchDigest

_LONGEST = 20_000
_ADDRESS = re.compile(r" at 0x[0-9a-f]+", re.IGNORECASE)


def identity(settings: LightningSettings, module: Any, fields: Iterable[Field]) -> dict[str, Any]:
    """Return what must be equal for a training to continue: what is trained, on which columns, with which settings."""
    found = identity_of(settings, fields)
    found |= {f"weights {k}": f"{v.dtype} {list(v.shape)}" for k, v in module.state_dict().items()}
    return found


def identity_with_code(settings: LightningSettings, module: Any, fields: Iterable[Field]) -> dict[str, Any]:
    """Return what the driver knows of a training: `identity`, the rows to validate on, and digests of code."""
    found = identity(settings, module, fields)
    found["validation"] = rows_of(settings)
    code = {
        "model": [kind for kind in dict.fromkeys(map(type, module.modules())) if is_own(kind)],
        **{name: getattr(settings, name) for name in ("initial_weights", "trainer_args", "decode")},
        HELD: module,
    }
    texts = {name: TorchDigest.describe(thing) for name, thing in code.items()}
    texts |= dict.fromkeys(("model", HELD), name_of(module))
    parts = {name: dict(TorchDigest.of(thing)._asdict()) for name, thing in code.items()}
    return {
        **found,
        "code": {name: {"text": texts[name], **parts[name]} for name in code},
        "architecture": _ADDRESS.sub("", repr(module))[:_LONGEST],
        "versions": {
            "Python": ".".join(map(str, sys.version_info[:2])),
            "torch": str(torch.__version__),
            "Lightning": str(lightning.__version__),
        },
    }
