"""Whether all ranks hold the same weights, by checksums (rank)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tritium.errors import RanksDiffer
from tritium.ml.ranks import Ranks

_ROUNDING = 1e-3  # relative to the largest weight of a tensor


def refuse_different(
    module: torch.nn.Module, ranks: Ranks, tell: Callable[[str], Any], processor: str | None = None
) -> None:
    """RanksDiffer, on every rank, where a weight or buffer is not the same bits on all of them. A collective.

    One pass over the weights, and one exchange of 16 bytes a tensor; more is exchanged only where something differs.
    Ranks on different kinds of processors may round differently: a difference that is no larger is told, by `tell`.
    """
    if ranks.size == 1:
        return
    tensors = {
        name: value
        for name, value in module.state_dict().items()
        if isinstance(value, torch.Tensor) and value.layout == torch.strided and value.numel()
    }
    if not tensors:
        return
    sums = torch.stack([checksum(value).to(ranks.device) for value in tensors.values()])
    largest = ranks.largest(torch.cat([sums, ~sums]))  # ~ turns the order round: the least is found along with it
    if torch.equal(largest[: len(sums)], ~largest[len(sums) :]):
        return
    each = ranks.gather((sums.tolist(), processor or _processor(ranks.device)))
    differ = [i for i in range(len(sums)) if len({sums[i] for sums, _ in each}) > 1]
    names = [list(tensors)[i] for i in differ]
    worst = [_difference(tensors[name], ranks) for name in names]
    processors = sorted({kind for _, kind in each})
    if len(processors) > 1 and all(relative <= _ROUNDING for _, relative in worst):
        tell(
            f"the weights differ between ranks by no more than rounding (at most {max(a for a, _ in worst):.1e}, in "
            f"{len(names)} tensors), as they compute on different processors ({', '.join(processors)}); the model is "
            "rank 0's"
        )
        return
    by_value: dict[int, list[int]] = {}
    for rank, (values, _) in enumerate(each):
        by_value.setdefault(values[differ[0]], []).append(rank)
    most, *others = sorted(by_value.values(), key=len, reverse=True)
    wrong = sorted(rank for group in others for rank in group)
    raise RanksDiffer(
        f"The weights differ between ranks, so that there is no model: {names[0]!r} is the same on {_ranks(most)}, and "
        f"another on {_ranks(wrong)} (they differ by up to {worst[0][0]:.3g}; {len(names)} of {len(tensors)} tensors "
        "differ). What changes weights or optimizer outside the training step must do the same on every rank: look at "
        "callbacks, at random numbers in them, and at what train_step changes by itself.",
        ranks=wrong,
        tensor=names[0],
    )


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """A sum over the tensor's bits, int64."""
    value = tensor.detach()
    if value.is_complex():
        value = torch.view_as_real(value.resolve_conj())
    bits = value.contiguous().reshape(-1).view(torch.uint8)
    if bits.storage_offset() % 8:  # a view of a larger tensor
        bits = bits.clone()
    whole = len(bits) // 8 * 8  # eight bytes at a time: four are summed at a twentieth of the speed
    return bits[:whole].view(torch.int64).sum() + bits[whole:].sum(dtype=torch.int64)


def _difference(tensor: torch.Tensor, ranks: Ranks) -> tuple[float, float]:
    """The largest difference to rank 0's tensor over all ranks, and the same relative to its largest value."""
    mine = tensor.detach().to(ranks.device)
    mine = (torch.view_as_real(mine.resolve_conj()) if mine.is_complex() else mine).double().contiguous()
    first = mine.clone()
    ranks.from_first([first])
    found = torch.stack([(mine - first).abs().max(), first.abs().max()])
    difference, size = ranks.largest(found).tolist()
    return difference, difference / size if size else difference


def _processor(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return torch.backends.cpu.get_cpu_capability()


def _ranks(numbers: list[int]) -> str:
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
