"""`TorchShard`: a rank's part of a sharded tensor (DTensor), such as FSDP2's, in the rank's own state (rank)."""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tritium.errors import BadSetting
from tritium.model.engines.torch_leaf import TorchTensor
from tritium.model.leaf import Leaf
from tritium.model.safetensors import Entry


class TorchShard(TorchTensor):
    """DTensors over a mesh of all ranks, in rank order. Each rank keeps its local part.

    They are restored as DTensors on the mesh's device if the process group has as many ranks as at the save, else as
    plain tensors of the local part.
    """

    name = "dtensor"
    of_one_rank = True

    def has(self, value: Any) -> bool:
        return type(value) is DTensor

    def same(self, value: Any, path: str) -> Hashable | None:
        mesh = value.device_mesh
        ranks = mesh.mesh.flatten().tolist()
        if ranks != list(range(dist.get_world_size())):
            raise BadSetting(
                f"{path} is sharded over the ranks {ranks}, and a checkpoint holds tensors that are sharded over all "
                f"{dist.get_world_size()} in their order. Save its full_tensor().",
                path=path,
            )
        other = [placement for placement in value.placements if type(placement) not in (Shard, Replicate)]
        if other:
            raise BadSetting(
                f"{path} is placed as {other[0]}, and a checkpoint holds Shard and Replicate. Save its full_tensor().",
                path=path,
            )
        return super().same(value.to_local(), path)

    def leaf(self, value: Any, name: str) -> Leaf:
        return super().leaf(value.to_local(), name)

    def facts(self, value: Any) -> dict[str, Any]:
        mesh = value.device_mesh
        return {
            "whole": list(value.shape),
            "stride": list(value.stride()),
            "placements": [placement.dim if type(placement) is Shard else None for placement in value.placements],
            "mesh": [mesh.device_type, list(mesh.shape), mesh.mesh_dim_names],
        }

    def restored(self, buffer: bytearray, name: str, entry: Entry, node: Mapping[str, Any]) -> Any:
        local = super().restored(buffer, name, entry, node)
        device, shape, names = node["mesh"]
        if not dist.is_initialized() or dist.get_world_size() != math.prod(shape):
            return local
        mesh = _mesh(device, tuple(shape), None if names is None else tuple(names), dist.group.WORLD)
        placements = [Replicate() if dim is None else Shard(dim) for dim in node["placements"]]
        whole, stride = torch.Size(node["whole"]), tuple(node["stride"])
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole, stride=stride)


@functools.lru_cache
def _mesh(device: str, shape: tuple[int, ...], names: tuple[str, ...] | None, group: Any) -> DeviceMesh:
    """Return the mesh. It is made once for all tensors, as one of several dimensions makes process groups."""
    return init_device_mesh(device, shape, mesh_dim_names=names)
