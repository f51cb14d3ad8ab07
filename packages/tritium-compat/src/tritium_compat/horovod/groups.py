"""The process groups that collectives go over, beside those of the user's own torch.distributed (rank)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

dist: Any = torch.distributed
PATIENCE = timedelta(hours=24)
"""How long a rank may wait for another one; Tritium's `stall_timeout` is what notices a rank that hangs."""
_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
_REDUCTIONS["product"] = dist.ReduceOp.PRODUCT
_BY_BYTES = (torch.bool, torch.int16)  # Gloo moves them, but has no such type
_kept: list[Any] = []  # Gloo's destructor can deadlock, see frameworks.torch.keep_groups


class Groups:
    """Connects some ranks by Gloo, and by NCCL once a tensor on a GPU comes. One rank needs no connection."""

    def __init__(self, store: Any, name: str, rank: int, size: int) -> None:
        """Connect. rank, size : the place among the ranks that are connected."""
        self._rank, self._size = rank, size
        self._store = None if store is None else dist.PrefixStore(name, store)
        self._of: dict[str, Any] = {}
        if size > 1:
            self._of["cpu"] = dist.ProcessGroupGloo(dist.PrefixStore("cpu", self._store), rank, size, PATIENCE)
            _kept.append(self._of["cpu"])

    def _group(self, device: str) -> Any:
        if device not in self._of:
            nccl = dist.ProcessGroupNCCL(dist.PrefixStore(device, self._store), self._rank, self._size)
            self._of[device] = nccl
            _kept.append(nccl)
        return self._of[device]

    def reduce(self, tensor: torch.Tensor, op: str) -> None:
        """Put the sum, "min", "max" or "product" of all ranks into the tensor."""
        if self._size == 1:
            return
        options = dist.AllreduceOptions()
        options.reduceOp = _REDUCTIONS[op]
        self._group(tensor.device.type).allreduce([tensor], options).wait()

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Put the tensor of the rank `root` into that of the others."""
        if self._size == 1:
            return
        options, sent = dist.BroadcastOptions(), tensor.contiguous()
        options.rootRank = root
        self._group(tensor.device.type).broadcast([_bytes(sent)], options).wait()
        if sent is not tensor:
            tensor.copy_(sent)

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all ranks, which have the same shape."""
        if self._size == 1:
            return [tensor]
        parts = [torch.empty_like(tensor) for _ in range(self._size)]
        group = self._group(tensor.device.type)
        group.allgather([[_bytes(part) for part in parts]], [_bytes(tensor)]).wait()
        return parts

    def gather_rows(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all ranks, which may differ in their first dimension."""
        counts = [int(count) for count in self.gather(torch.tensor([len(tensor)]))]
        most = max(counts)
        if len(tensor) < most:
            padded = tensor.new_zeros((most, *tensor.shape[1:]))
            padded[: len(tensor)] = tensor
            tensor = padded
        return [part[:count] for part, count in zip(self.gather(tensor), counts, strict=True)]

    def exchange_rows(self, tensor: torch.Tensor, splits: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
        """Send `splits[i]` rows to rank i. Returns the rows that came, by rank, and how many came from each."""
        tensor = tensor[: sum(splits)].contiguous()
        if self._size == 1:
            return tensor.clone(), list(splits)
        every = self.gather(torch.tensor(list(splits)))
        received = [int(part[self._rank]) for part in every]
        out = tensor.new_empty((sum(received), *tensor.shape[1:]))
        group = self._group(tensor.device.type)
        options = dist.AllToAllOptions()
        group.alltoall_base(_bytes(out), _bytes(tensor), received, list(splits), options).wait()
        return out, received

    def abort(self) -> None:
        """Close the connections, so that ranks which wait for this one get an error."""
        for group in self._of.values():
            group.abort()

    def gather_objects(self, payload: bytes) -> list[bytes]:
        """Return the bytes of all ranks."""
        rows = self.gather_rows(torch.frombuffer(bytearray(payload or b"\0"), dtype=torch.uint8))
        return [bytes(row.numpy().tobytes()) for row in rows]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.unsqueeze(-1).view(torch.uint8) if tensor.dtype in _BY_BYTES else tensor


def cuda_event() -> Any:
    """Return an event of CUDA, which tells other streams when something is done."""
    event: Any = torch.cuda.Event
    return event()
