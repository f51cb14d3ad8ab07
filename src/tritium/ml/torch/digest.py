"""Digests of modules and tensors, to compare them between sessions (driver)."""

from __future__ import annotations

import hashlib
from typing import Any, ClassVar

import torch

from tritium.arguments import name_of
from tritium.checkpoint.code import SHORT, CodeDigest, Parts
from tritium.ml.torch.equal_weights import checksum


class TorchDigest(CodeDigest):
    """A digest of a module by its class, its plain attributes and its shapes; of its weights only where `exact`."""

    simple: ClassVar[tuple[type, ...]] = (*CodeDigest.simple, torch.dtype, torch.device, torch.Size)

    @classmethod
    def describe(cls, thing: Any) -> str:
        """Return a short text for messages: `MSELoss(reduction='mean')`, `partial(mse_loss, beta=2.0)`, a name."""
        if not isinstance(thing, torch.nn.Module):
            return super().describe(thing)
        settings = {k: v for k, v in vars(thing).items() if not k.startswith("_") and k != "training"}
        plain = [f"{k}={v!r}" for k, v in settings.items() if isinstance(v, bool | int | float | str)]
        return f"{name_of(thing)}({', '.join(plain)})"[:SHORT]

    def of_framework(self, thing: Any) -> Parts | None:
        """Return the texts of a module or a tensor; None for any other object."""
        if isinstance(thing, torch.Tensor):
            return Parts(_tensor(thing))
        return self._module(thing) if isinstance(thing, torch.nn.Module) else None

    def _module(self, module: torch.nn.Module) -> Parts:
        settings = {
            name: value
            for name, value in vars(module).items()
            if not name.startswith("_") and name != "training" and not (callable(value) and hasattr(type(module), name))
        }
        tensors = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
        shapes = {name: (str(t.dtype), tuple(t.shape)) for name, t in tensors.items()}
        if self.exact and not self.captured:
            weights = self.named("tensors", {name: t.detach() for name, t in tensors.items()})
        else:  # a checksum is enough for a guess: the digest of a gigabyte takes seconds
            weights = Parts("", "", " ".join(f"{name} {_sum(t)}" for name, t in sorted(tensors.items())))
        parts = [self.parts(type(module)), self.named("settings", settings), self.named("shapes", shapes), weights]
        return self.joined("module", [*parts, self.named("children", dict(module.named_children()))])


def _tensor(tensor: torch.Tensor) -> str:
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        return f"tensor {tensor.dtype} {list(tensor.shape)} {tensor.layout}"
    bits = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    digest = hashlib.sha256(bits.data).hexdigest()  # without a copy, as a model may be large
    return f"tensor {tensor.dtype} {list(tensor.shape)} {digest}"


def _sum(tensor: torch.Tensor) -> int | None:
    return int(checksum(tensor)) if tensor.layout == torch.strided and tensor.device.type != "meta" else None
