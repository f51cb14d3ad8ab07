"""The collectives themselves, of requests that are ready on all ranks (rank)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch

from tritium_compat.horovod.expected import Fused
from tritium_compat.horovod.groups import Groups, cuda_event
from tritium_compat.horovod.request import Request, Signature

AVERAGE, SUM, ADASUM, MIN, MAX, PRODUCT = "average", "sum", "adasum", "min", "max", "product"
_FUSED = 64 << 20  # bytes of tensors that go as one
_UPCAST = (torch.float16, torch.bfloat16)  # on CPUs, summed and scaled as float32


class Collectives:
    """Does requests in the order in which they are given, which is the same on every rank."""

    def __init__(self, groups: Groups, ranks: Sequence[int], rank: int) -> None:
        self._groups, self._ranks, self._place, self._size = groups, ranks, list(ranks).index(rank), len(ranks)

    def do(self, requests: Sequence[Request]) -> None:
        """Do all, and end each request with its result."""
        for fused, group in groupby(requests, key=lambda request: _fusing(request.signature)):
            for request in (part := list(group)):
                if request.before is not None:
                    torch.cuda.current_stream().wait_event(request.before)
            if fused is not None:
                self._allreduce(part)
            else:
                for request in part:
                    request.result = getattr(self, f"_{request.signature.kind}")(request)
            for request in part:
                if request.signature.device != "cpu":
                    request.after = cuda_event()
                    request.after.record()
                request.end(request.result)

    def _allreduce(self, requests: Sequence[Request]) -> None:
        detail = dict(requests[0].signature.detail)
        op, before, after = detail["op"], detail["prescale_factor"], detail["postscale_factor"]
        for request in requests:
            if not request.tensors:  # this rank has joined
                request.tensors = request.outputs = zeros(request.signature)
        pairs = [pair for request in requests for pair in zip(request.tensors, request.outputs, strict=True)]
        by_type = sorted(pairs, key=lambda pair: str(pair[0].dtype))
        for _, group in groupby(by_type, key=lambda pair: pair[0].dtype):
            for part in _parts(list(group)):
                if op == ADASUM:
                    for tensor, output in part:
                        output.copy_(self._adasum(tensor * before if before != 1 else tensor).mul_(after))
                else:
                    self._reduce(part, op, before, after)
        for request in requests:
            request.result = list(request.outputs)

    def _reduce(self, pairs: Sequence[tuple[Any, Any]], op: str, before: float, after: float) -> None:
        """Reduce tensors of one type as one, into their outputs."""
        first, out = pairs[0]
        if len(pairs) == 1 and out.is_contiguous():
            flat = out.copy_(first) if out is not first else out
        else:
            flat = torch.cat([tensor.reshape(-1) for tensor, _ in pairs])
        total = flat.float() if flat.dtype in _UPCAST and flat.device.type == "cpu" else flat
        total = _scaled(total, before)
        self._groups.reduce(total, SUM if op == AVERAGE else op)
        if op == AVERAGE:
            after /= self._size
        total = _scaled(total, after)
        if len(pairs) == 1:
            if total is not out:
                out.copy_(total.view_as(out))
            return
        _spread(total, [output for _, output in pairs])

    def try_fused(self, requests: Sequence[Request], expected: Fused) -> torch.Tensor | None:
        """Sum the tensors of requests as one, if all ranks have them, and return the sums; None: they have not.

        requests : none where this rank has not. The tensors stay as they are; `end_fused` writes the outputs.
        """
        if requests:
            parts = [tensor.reshape(-1) for request in requests for tensor in request.tensors]
            flat = torch.cat([torch.ones(1, dtype=parts[0].dtype), *parts])
            _scaled(flat[1:], dict(requests[0].signature.detail)["prescale_factor"])
        else:
            flat = torch.zeros(1 + expected.elements, dtype=getattr(torch, expected.dtype))
        self._groups.reduce(flat, SUM)
        return flat[1:] if int(flat[0]) == self._size else None

    def end_fused(self, requests: Sequence[Request], total: torch.Tensor) -> None:
        """Write what `try_fused` returned into the outputs, and end the requests."""
        detail = dict(requests[0].signature.detail)
        total = _scaled(total, detail["postscale_factor"] / (self._size if detail["op"] == AVERAGE else 1))
        _spread(total, [output for request in requests for output in request.outputs])
        for request in requests:
            request.end(list(request.outputs))

    def _adasum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the adaptive sum: orthogonal gradients are added, parallel ones averaged, pair by pair."""
        parts = [part.double() for part in self._groups.gather(tensor.contiguous())]
        while len(parts) > 1:
            parts = [_adasum(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
        return parts[0].to(tensor.dtype)

    def _allgather(self, request: Request) -> list[Any]:
        return [torch.cat(self._groups.gather_rows(tensor)) for tensor in request.tensors]

    def _broadcast(self, request: Request) -> list[Any]:
        root = dict(request.signature.detail)["root_rank"]
        for tensor, output in zip(request.tensors, request.outputs, strict=True):
            if output is not tensor and self._ranks[self._place] == root:
                output.copy_(tensor)
            self._groups.broadcast(output, self._ranks.index(root))
        return list(request.outputs)

    def _alltoall(self, request: Request) -> list[Any]:
        out, received = self._groups.exchange_rows(request.tensors[0], request.splits)
        return [out, torch.tensor(received, dtype=torch.int32)]

    def _reducescatter(self, request: Request) -> list[Any]:
        """Reduce, and keep the part of this rank: the first ones have a row more where rows don't divide evenly."""
        detail = dict(request.signature.detail)
        whole = [tensor.clone() for tensor in request.tensors]
        for part in whole:
            self._reduce([(part, part)], detail["op"], detail["prescale_factor"], detail["postscale_factor"])
        return [part.tensor_split(self._size)[self._place].clone() for part in whole]

    def _barrier(self, request: Request) -> list[Any]:
        return []


def zeros(signature: Signature) -> list[torch.Tensor]:
    """Return what a rank that has joined adds to a sum."""
    device = "cpu" if signature.device == "cpu" else torch.device(signature.device, torch.cuda.current_device())
    return [torch.zeros(shape, dtype=getattr(torch, dtype), device=device) for dtype, shape in signature.tensors]


def _spread(total: torch.Tensor, outputs: Sequence[torch.Tensor]) -> None:
    """Copy the elements of a flat tensor into tensors, one after the other."""
    start = 0
    for output in outputs:
        output.copy_(total[start : start + output.numel()].view_as(output))
        start += output.numel()


def _fusing(signature: Signature) -> Any:
    """Return what must be equal for allreduces to go as one; None for other collectives."""
    return (signature.device, signature.detail) if signature.kind == "allreduce" else None


def _parts(pairs: Sequence[tuple[Any, Any]]) -> list[list[tuple[Any, Any]]]:
    found: list[list[tuple[Any, Any]]] = [[]]
    size = 0
    for pair in pairs:
        own = pair[0].numel() * pair[0].element_size()
        if found[-1] and size + own > _FUSED:
            found.append([])
            size = 0
        found[-1].append(pair)
        size += own
    return found


def _scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Multiply, in place where possible. Integers are multiplied as float64, and cut off."""
    if factor == 1:
        return tensor
    if tensor.is_floating_point():
        return tensor.mul_(factor)
    return tensor.copy_((tensor.double() * factor).trunc())


def _adasum(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    dot, of_a, of_b = (float((x * y).sum()) for x, y in ((a, b), (a, a), (b, b)))
    left = 1 - dot / (2 * of_a) if of_a else 1.0
    right = 1 - dot / (2 * of_b) if of_b else 1.0
    return left * a + right * b
