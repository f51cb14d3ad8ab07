"""The identity of a training with PyTorch, so that no other continues from its checkpoints (driver, rank)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch

from tritium.arguments import name_of
from tritium.checkpoint import identity as identities
from tritium.checkpoint.code import Opened, describe
from tritium.checkpoint.identity import GROUP, identity_of
from tritium.closures import is_own
from tritium.data.schema import Field
from tritium.ml.torch.ddp import ddp_identity
from tritium.ml.torch.settings import TorchSettings

_ADDRESS = re.compile(r" at 0x[0-9a-f]+", re.IGNORECASE)


def identity(
    settings: TorchSettings, module: torch.nn.Module, optimizer: Any, fields: Iterable[Field]
) -> dict[str, Any]:
    """Return what must be equal for a training to continue: what is trained, on which columns, with which settings.

    Must be called before a scheduler or a callback changes the optimizer's groups.
    """
    facts = identity_of(settings, fields) | ddp_identity(settings.ddp_options) | weights_identity(module)
    facts["optimizer"] = name_of(optimizer)
    for number, group in enumerate(getattr(optimizer, "param_groups", ())):
        options = {name: _plain(value) for name, value in group.items() if name != "params"}
        facts |= {f"{GROUP} {number} {name}": value for name, value in options.items()}
        facts[f"{GROUP} {number} tensors"] = len(group["params"])
    return facts


def identity_with_code(
    settings: TorchSettings, module: torch.nn.Module, optimizer: Any, fields: Iterable[Field]
) -> dict[str, Any]:
    """Return what the driver knows of a training. `optimizer` is None where it can't be made on the driver."""
    facts = identity(settings, module, optimizer, fields)
    hook = (settings.ddp_options or {}).get("comm_hook")
    things = {
        "optimizer": None if optimizer is None else type(optimizer),
        "ddp_options": None if isinstance(hook, str) else hook,
        "metrics": settings.named_metrics(),
    }
    facts["optimizer"] = None if optimizer is None else facts["optimizer"]
    return module_identity(facts, settings, module, things)


def weights_identity(module: torch.nn.Module) -> dict[str, str]:
    """Return dtype and shape of each tensor of a module's state."""
    return {f"weights {name}": f"{value.dtype} {list(value.shape)}" for name, value in module.state_dict().items()}


def module_identity(
    facts: dict[str, Any], settings: Any, module: torch.nn.Module, things: dict[str, Any]
) -> dict[str, Any]:
    """Return an identity with the code of a module and of these `things`."""
    kinds = [kind for kind in dict.fromkeys(map(type, module.modules())) if is_own(kind)]
    architecture = _ADDRESS.sub("", repr(module))
    whole = identities.identity_with_code(facts, settings, {**things, "model": kinds}, module, opened, architecture)
    return {**whole, "versions": {"torch": str(torch.__version__)}}


def opened(thing: Any) -> Opened | None:
    """Take apart a module, by its attributes, shapes and children, or a tensor; None for any other object."""
    if isinstance(thing, torch.nn.Module):
        return _module(thing)
    if isinstance(thing, torch.dtype | torch.device):
        return Opened(type(thing), {"value": repr(thing)})
    if not isinstance(thing, torch.Tensor):
        return None
    facts = {"dtype": str(thing.dtype), "shape": list(thing.shape), "layout": str(thing.layout)}
    if thing.layout != torch.strided or thing.device.type == "meta":
        return Opened(torch.Tensor, facts)
    bits = thing.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return Opened(torch.Tensor, {**facts, "values": bits})


def _module(module: torch.nn.Module) -> Opened:
    settings = {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and name != "training" and not (callable(value) and hasattr(type(module), name))
    }
    tensors = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
    shapes = {name: (str(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()}
    inner = {"shapes": shapes, "children": dict(module.named_children())}
    return Opened(type(module), {**settings, **inner}, tensors)


def _plain(value: Any) -> Any:
    """Return an optimizer's option as a checkpoint can hold it."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value if isinstance(value, bool | int | float | str | None) else describe(value, opened)
