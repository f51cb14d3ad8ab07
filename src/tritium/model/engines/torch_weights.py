"""A torch module's weights as a safetensors file, written as a stream and read as views of it (any process)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tritium.errors import MALFORMED, BadSetting, ModelError
from tritium.model.engine import Buffer, Weights
from tritium.model.safetensors import CODES, NAMES, Entry, count_of, entries, header

if TYPE_CHECKING:
    import torch

_CHUNK = 64 << 20


@dataclass(frozen=True)
class Tensors(Weights):
    """A module's parameters and buffers by name, each once, and the other names of those that are tied."""

    named: dict[str, torch.Tensor]
    tied: dict[str, str]

    @classmethod
    def of(cls, module: torch.nn.Module) -> Tensors:
        """Return the module's own tensors, not copies. Raises BadSetting for what safetensors can't hold."""
        return cls.of_state(module.state_dict(keep_vars=True))

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Tensors:
        """Return the tensors of a module's state; those that are one object are tied."""
        import torch

        named: dict[str, torch.Tensor] = {}
        tied: dict[str, str] = {}
        first: dict[int, str] = {}
        for name, value in state.items():
            if not isinstance(value, torch.Tensor):
                raise BadSetting(
                    f"{name!r} in the module's state is a {type(value).__name__}, no tensor (get_extra_state). "
                    "A model holds tensors; keep other state as attributes of the module."
                )
            if value.layout is not torch.strided or value.is_quantized or value.is_meta or _code(value) is None:
                raise BadSetting(
                    f"{name!r} is a {value.dtype} tensor of layout {value.layout} on {value.device}, which "
                    "safetensors can't hold."
                )
            if id(value) in first:
                tied[name] = first[id(value)]
            else:
                first[id(value)] = name
                named[name] = value
        return cls(named, tied)

    def stream(self) -> Iterator[memoryview]:
        """Yield the file in pieces; at most one tensor is copied at a time, and none that is contiguous on the CPU."""
        import torch

        order = sorted(self.named, key=lambda n: (-self.named[n].element_size(), n))  # Wide first, to align all.
        tensors = ((name, self.named[name]) for name in order)
        sizes = ((name, str(_code(t)), t.shape, t.numel() * t.element_size()) for name, t in tensors)
        yield memoryview(header(sizes, {"format": "pt", "tied": json.dumps(self.tied)}))
        for name in order:
            flat = self.named[name].detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
            if flat.numel():
                data: Any = flat.view(torch.uint8).numpy()
                for start in range(0, len(data), _CHUNK):
                    yield memoryview(data[start : start + _CHUNK])


def _code(tensor: torch.Tensor) -> str | None:
    return CODES.get(str(tensor.dtype).removeprefix("torch."))


def read(buffer: Buffer) -> dict[str, torch.Tensor]:
    """Return tensors by name as views of `buffer` (writable; a private map copies only the pages that are written)."""
    by_name, metadata = entries(buffer)
    tensors = {name: tensor(buffer, name, entry, NAMES[entry.code], entry.shape) for name, entry in by_name.items()}
    try:
        return tensors | {name: tensors[other] for name, other in json.loads(metadata.get("tied", "{}")).items()}
    except MALFORMED as error:
        raise ModelError(f"The names of tied weights are damaged: {error!r:.200}.") from error


def tensor(buffer: Buffer, name: str, entry: Entry, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    """Return one tensor of a file, as a view of `buffer`. Raises ModelError where its size does not fit."""
    import torch

    kind: torch.dtype = getattr(torch, dtype)
    size = entry.end - entry.start
    if count_of(shape) * kind.itemsize != size:
        raise ModelError(
            f"The weights are cut short or damaged at {name!r}: {size} bytes for {dtype} of the shape {list(shape)}."
        )
    try:
        if size == 0:
            return torch.empty(list(shape), dtype=kind)
        return torch.frombuffer(buffer, dtype=kind, count=size // kind.itemsize, offset=entry.start).view(list(shape))
    except RuntimeError as error:
        raise ModelError(f"The weights are damaged at {name!r}: {error}.") from error


def as_parameter(tensor: torch.Tensor, trainable: bool) -> torch.nn.Parameter:
    """Return the tensor as a parameter. Raises ModelError for one that can't have a gradient and should."""
    import torch

    try:
        return torch.nn.Parameter(tensor, requires_grad=trainable)
    except RuntimeError as error:
        raise ModelError(f"The weights are damaged: {error}.") from error
