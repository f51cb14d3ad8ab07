"""Horovod's collectives of torch tensors: those that return a handle, and those that wait (rank)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tritium_compat.horovod import context
from tritium_compat.horovod.basics import Adasum, Average, Max, Min, ProcessSet, Product, Sum, global_process_set
from tritium_compat.horovod.engine import Engine
from tritium_compat.horovod.request import Request, Signature

_OPS = (Average, Sum, Adasum, Min, Max, Product)
_DTYPES = (
    *(torch.uint8, torch.int8, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)
_MOVED = (*_DTYPES, torch.int16, torch.bool)  # that need not be summed


@dataclass
class Handle:
    """A collective that was asked for."""

    engine: Engine
    request: Request
    finish: Callable[[Any], Any]
    """Makes what the caller gets of the request's result."""


def poll(handle: Handle) -> bool:
    """Return whether the collective is done, so that `synchronize` does not wait."""
    return handle.engine.poll(handle.request)


def synchronize(handle: Handle) -> Any:
    """Wait for a collective, and return its result. Raises HorovodInternalError."""
    return handle.finish(handle.engine.wait(handle.request))


def reduction(average: Any, op: Any) -> str:
    """Return the operation that the arguments `average`, which is deprecated, and `op` mean."""
    if average is not None:
        if op is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        warnings.warn("Parameter `average` has been replaced with `op` and will be removed in v1.0", stacklevel=4)
        return Average if average else Sum
    if op is None:
        return Average
    if op not in _OPS:
        raise ValueError(f"op={op!r} is none of hvd.Average, Sum, Adasum, Min, Max and Product.")
    return str(op)


def submit(
    kind: str,
    tensors: Sequence[torch.Tensor],
    name: str | None,
    process_set: ProcessSet,
    *,
    outputs: Sequence[torch.Tensor] = (),
    detail: dict[str, Any] | None = None,
    splits: Sequence[int] | None = None,
    finish: Callable[[Any], Any] = lambda result: result[0],
) -> Handle:
    """Ask for a collective of tensors that are on one device. Raises ValueError for tensors that it can't take."""
    engine = context.current().engine(process_set._number())
    allowed = _DTYPES if kind in ("allreduce", "reducescatter") else _MOVED
    for tensor in tensors:
        if tensor.dtype not in allowed:
            raise ValueError(f"{kind} of {dtype_name(tensor.dtype)} is not supported. Convert the tensor before.")
        if tensor.device.type != tensors[0].device.type:
            raise ValueError(
                f"{kind} of tensors on {tensors[0].device} and on {tensor.device}: move them to one device."
            )
    signature = Signature(
        kind,
        context.current().name(kind) if name is None else str(name),
        tuple((dtype_name(tensor.dtype), tuple(tensor.shape)) for tensor in tensors),
        tensors[0].device.type if tensors else "cpu",
        tuple(sorted((detail or {}).items())),
    )
    given = [tensor.detach() for tensor in tensors]
    kept = [output.detach() for output in outputs]
    return Handle(engine, engine.submit(Request(signature, given, kept, splits)), finish)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def reducing(op: str, prescale_factor: float, postscale_factor: float, process_set: ProcessSet) -> dict[str, Any]:
    if op == Adasum:
        if process_set.process_set_id != 0:
            raise NotImplementedError("Adasum does not support non-global process sets yet.")
        count = process_set.size()
        if count & (count - 1):
            raise NotImplementedError("Running Adasum with non-power of 2 ranks is not supported yet.")
    return {"op": op, "prescale_factor": float(prescale_factor), "postscale_factor": float(postscale_factor)}


def start_allreduce(
    tensors: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    name: str | None,
    op: str,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    finish: Callable[[Any], Any],
) -> Handle:
    """Ask for one allreduce of all tensors, into the outputs."""
    detail = reducing(op, prescale_factor, postscale_factor, process_set)
    return submit("allreduce", tensors, name, process_set, outputs=outputs, detail=detail, finish=finish)


def allreduce_async(
    tensor: torch.Tensor,
    average: Any = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin to average, or reduce by `op`, the tensor over all ranks; the tensor itself stays as it is."""
    op, output = reduction(average, op), torch.empty_like(tensor, memory_format=torch.contiguous_format)
    return start_allreduce([tensor], [output], name, op, prescale_factor, postscale_factor, process_set, lambda r: r[0])


def allreduce_async_(
    tensor: torch.Tensor,
    average: Any = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin to average, or reduce by `op`, over all ranks, in place."""
    op = reduction(average, op)
    finish = lambda _: tensor  # noqa: E731
    return start_allreduce([tensor], [tensor], name, op, prescale_factor, postscale_factor, process_set, finish)


def allreduce_(
    tensor: torch.Tensor,
    average: Any = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Average, or reduce by `op`, over all ranks, in place."""
    handle = allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    result: torch.Tensor = synchronize(handle)
    return result


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: Any = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin to reduce several tensors as one."""
    op, given = reduction(average, op), list(tensors)
    outputs = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in given]
    return start_allreduce(given, outputs, name, op, prescale_factor, postscale_factor, process_set, list)


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: Any = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin to reduce several tensors as one, in place."""
    op, given = reduction(average, op), list(tensors)
    finish = lambda _: given  # noqa: E731
    return start_allreduce(given, given, name, op, prescale_factor, postscale_factor, process_set, finish)


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: Any = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduce several tensors as one, in place."""
    handle = grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    result: list[torch.Tensor] = synchronize(handle)
    return result


def join(device: int = -1) -> int:
    """Say that this rank has no more rows: until all ranks have joined, it adds zeros to their allreduces.

    Returns the last rank that joined.
    """
    now = context.current()
    last = now.engine(0).join()
    now.names_anew()  # ranks with more rows have asked for more collectives without a name
    return last


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks have come here."""
    synchronize(submit("barrier", [], None, process_set, finish=lambda _: None))
