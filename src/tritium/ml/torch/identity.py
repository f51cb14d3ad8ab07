"""The identity of a training with PyTorch, so that no other continues from its checkpoints (driver, rank)."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import Any

import torch

from tritium.arguments import name_of
from tritium.checkpoint.code import is_own
from tritium.checkpoint.identity import GROUP, HELD, identity_of, rows_of
from tritium.data.schema import Field
from tritium.ml.torch.ddp_options import ddp_identity
from tritium.ml.torch.digest import TorchDigest
from tritium.ml.torch.settings import TorchSettings

_LONGEST = 20_000
_ADDRESS = re.compile(r" at 0x[0-9a-f]+", re.IGNORECASE)


def identity(
    settings: TorchSettings, module: torch.nn.Module, optimizer: Any, fields: Iterable[Field]
) -> dict[str, Any]:
    """Return what must be equal for a training to continue: what is trained, on which columns, with which settings.

    Must be called before a scheduler or a callback changes the optimizer's groups.
    """
    found = identity_of(settings, fields)
    found |= ddp_identity(settings.ddp_options)
    found["optimizer"] = name_of(optimizer)
    for number, group in enumerate(getattr(optimizer, "param_groups", ())):
        options = {name: _plain(value) for name, value in group.items() if name != "params"}
        found |= {f"{GROUP} {number} {name}": value for name, value in options.items()}
        found[f"{GROUP} {number} tensors"] = len(group["params"])
    found |= {f"weights {k}": f"{v.dtype} {list(v.shape)}" for k, v in module.state_dict().items()}
    return found


def identity_with_code(
    settings: TorchSettings, module: torch.nn.Module, optimizer: Any, fields: Iterable[Field]
) -> dict[str, Any]:
    """Return what the driver knows of a training: `identity`, the rows to validate on, and digests of code.

    `optimizer` is None where it can't be made on the driver.
    """
    found = identity(settings, module, optimizer, fields)
    found["validation"] = rows_of(settings)
    hook = (settings.ddp_options or {}).get("comm_hook")
    code = {
        "model": [kind for kind in dict.fromkeys(map(type, module.modules())) if is_own(kind)],
        "optimizer": None if optimizer is None else type(optimizer),
        **{
            name: getattr(settings, name)
            for name in ("initial_weights", "loss", "train_step", "lr_scheduler", "decode", "transform")
        },
        "comm_hook": None if isinstance(hook, str) else hook,
        "metrics": settings.named_metrics(),
        HELD: module,
    }
    texts = {name: TorchDigest.describe(thing) for name, thing in code.items()}
    texts |= dict.fromkeys(("model", HELD), name_of(module))
    parts = {name: dict(TorchDigest.of(thing, exact=name == "loss")._asdict()) for name, thing in code.items()}
    return {
        **found,
        "optimizer": None if optimizer is None else found["optimizer"],
        "code": {name: {"text": texts[name], **parts[name]} for name in code},
        "architecture": _ADDRESS.sub("", repr(module))[:_LONGEST],
        "versions": {"Python": ".".join(map(str, sys.version_info[:2])), "torch": str(torch.__version__)},
    }


def _plain(value: Any) -> Any:
    """Return an optimizer's option as a checkpoint can hold it."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value if isinstance(value, bool | int | float | str | None) else TorchDigest.describe(value)
