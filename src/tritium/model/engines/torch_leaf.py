"""`TorchTensor`: torch's tensors and parameters in a state (any process)."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from tritium.errors import BadSetting
from tritium.model.engines import torch_weights
from tritium.model.leaf import Kind, Leaf
from tritium.model.safetensors import CODES, Entry


class TorchTensor(Kind):
    """Tensors on any device, without autograd's history. They are restored on the CPU."""

    name = "torch"

    def has(self, value: Any) -> bool:
        return type(value) in (torch.Tensor, torch.nn.Parameter)

    def same(self, value: Any, path: str) -> Hashable | None:
        if value.layout is not torch.strided or value.is_quantized or value.is_meta:
            raise BadSetting(
                f"{path} is a {value.dtype} tensor of layout {value.layout} on {value.device}, which a checkpoint "
                "can't hold.",
                path=path,
            )
        bits = (value.is_conj(), value.is_neg())
        view = (value.data_ptr(), value.device, value.dtype, value.shape, value.stride(), *bits)
        return view if value.numel() else None

    def leaf(self, value: Any, name: str) -> Leaf:
        dtype, width = str(value.dtype).removeprefix("torch."), value.element_size()
        return Leaf(self, name, value, dtype, CODES.get(dtype), tuple(value.shape), width, value.numel() * width)

    def facts(self, value: Any) -> dict[str, Any]:
        return {} if type(value) is torch.Tensor else {"parameter": value.requires_grad}

    def copy(self, leaf: Leaf, into: np.ndarray[Any, Any]) -> None:
        target = torch.from_numpy(into).view(leaf.value.dtype).view(leaf.shape)
        target.copy_(leaf.value.detach(), non_blocking=leaf.value.is_cuda)

    def locks(self, value: Any) -> bool:
        return bool(value.is_cuda)

    def locked(self, size: int) -> tuple[Any, np.ndarray[Any, Any]]:
        owner = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return owner, owner.numpy()

    def wait(self, values: Iterable[Any]) -> None:
        for device in {value.device for value in values if value.is_cuda}:
            torch.cuda.synchronize(device)

    def restored(self, buffer: bytearray, name: str, entry: Entry, node: Mapping[str, Any]) -> Any:
        tensor = torch_weights.tensor(buffer, name, entry, node["dtype"], node["shape"])
        if "parameter" in node:
            return torch_weights.as_parameter(tensor, node["parameter"])
        return tensor
