"""The check by checksums that all ranks hold the same weights, and the broadcast of buffers (rank)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tritium.errors import RanksDiffer
from tritium.ml.torch.ddp import Ranks


def take_buffers(module: torch.nn.Module, ranks: Ranks) -> None:
    """Give every rank the buffers of rank 0. A collective call.

    A buffer that is not persistent may have another shape on each rank, e.g. if it holds the last batch. It is replaced
    by rank 0's, as DDP broadcasts buffers too and needs equal shapes. Raises RanksDiffer for a persistent one.
    """
    if ranks.size == 1:
        return
    mine = dict(module.named_buffers())
    each, odd = _odd(mine, ranks)
    if odd:
        _refuse_odd([name for name in odd if name in module.state_dict()], each, ranks, "buffer ")
        theirs = {name: mine[name].cpu() for name in odd if name in mine and ranks.rank == 0}
        for name, value in ranks.gather(theirs)[0].items():
            owner, _, last = name.rpartition(".")
            module.get_submodule(owner).register_buffer(last, value.to(ranks.device), persistent=False)
    ranks.from_first(value for name, value in mine.items() if name not in odd)


def _odd(tensors: Mapping[str, torch.Tensor], ranks: Ranks) -> tuple[list[dict[str, str]], list[str]]:
    """Return shape and type by name on each rank, and the names for which they differ.

    A collective call, of 16 bytes if none differs. It is needed because a collective over tensors whose sizes differ
    between ranks ends the process with SIGABRT.
    """
    shapes = {name: f"{value.dtype} {list(value.shape)}".removeprefix("torch.") for name, value in tensors.items()}
    if ranks.same(repr(sorted(shapes.items()))):
        return [], []
    each = ranks.gather(shapes)
    return each, sorted({name for some in each for name in some if any(s.get(name) != some[name] for s in each)})


def _refuse_odd(odd: list[str], each: list[dict[str, str]], ranks: Ranks, kind: str = "") -> None:
    """Raise RanksDiffer for the first of these tensors of any rank, which need not exist on all. A collective call."""
    odd = sorted({name for names in ranks.gather(odd) for name in names})
    if not odd:
        return
    name, first = odd[0], each[0].get(odd[0])
    wrong = [rank for rank, shapes in enumerate(each) if shapes.get(name) != first]
    other = each[wrong[0]].get(name)
    if first is None:
        what = f"{kind}{name!r} is none of rank 0's, and {other} on {_ranks(wrong)}"
    else:
        what = f"{kind}{name!r} is {first} on rank 0, and {other or 'not there'} on {_ranks(wrong)}"
    raise RanksDiffer(
        f"The tensors of the model differ between ranks, so that there is no model: {what} ({len(odd)} tensors in "
        "all). A layer or buffer that a callback or forward adds or replaces must be the same on every rank; what is "
        "of one batch alone is no part of the model: register_buffer(…, persistent=False), or a plain attribute.",
        ranks=wrong,
        tensor=name,
    )


def refuse_different(module: torch.nn.Module, ranks: Ranks) -> None:
    """Raise RanksDiffer, on every rank, where the bits of a weight or buffer differ between ranks. A collective call.

    Sharded weights are left out, of which no two ranks hold the same part. It reads the weights once, and exchanges 16
    bytes per tensor; more only where something differs.
    """
    if ranks.size == 1:
        return
    tensors = {
        name: value
        for name, value in module.state_dict().items()
        if isinstance(value, torch.Tensor) and not hasattr(value, "full_tensor")  # a DTensor, whose import takes 1 s
        if value.layout == torch.strided and value.numel()
    }
    each_has, odd = _odd(tensors, ranks)
    if odd:
        _refuse_odd(odd, each_has, ranks)
    if not tensors:
        return
    sums = torch.stack([checksum(value).to(ranks.device) for value in tensors.values()])
    largest = ranks.largest(torch.cat([sums, ~sums]))  # ~ reverses the order, so the maximum of ~sums gives the minimum
    if torch.equal(largest[: len(sums)], ~largest[len(sums) :]):
        return
    sums_by_rank = ranks.gather(sums.tolist())
    differ = [i for i in range(len(sums)) if len({sums[i] for sums in sums_by_rank}) > 1]
    name, by_value = list(tensors)[differ[0]], dict[int, list[int]]()
    for rank, values in enumerate(sums_by_rank):
        by_value.setdefault(values[differ[0]], []).append(rank)
    most, *others = sorted(by_value.values(), key=len, reverse=True)
    wrong = sorted(rank for group in others for rank in group)
    raise RanksDiffer(
        f"The weights differ between ranks, so that there is no model: {name!r} is the same on {_ranks(most)}, and "
        f"another on {_ranks(wrong)} ({len(differ)} of {len(tensors)} tensors differ). What changes weights or "
        "optimizer outside the training step must do the same on every rank: look at callbacks, at random numbers in "
        "them, and at what train_step changes by itself. Where ranks compute on different kinds of processors, which "
        "round differently, equal_weights=False takes rank 0's weights.",
        ranks=wrong,
        tensor=name,
    )


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return a sum over the tensor's bits, int64."""
    value = tensor.detach()
    if value.is_complex():
        value = torch.view_as_real(value.resolve_conj())
    bits = value.contiguous().reshape(-1).view(torch.uint8)
    if bits.storage_offset() % 8:  # a view of a larger tensor
        bits = bits.clone()
    whole = len(bits) // 8 * 8  # int32 would be summed at a twentieth of the speed of int64
    return bits[:whole].view(torch.int64).sum() + bits[whole:].sum(dtype=torch.int64)


def _ranks(numbers: list[int]) -> str:
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
