"""A sentence on the part that limits the steps of a run (driver)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tritium.observe.trace import SECTIONS

_DATA_SHARE = 0.10
"""The least share of a rank's time at which waiting for data, or copying, is named."""
_EXCHANGE_SHARE = 0.25
"""The same for the exchange between ranks."""
_LESS_WORK = 0.25
"""A rank with so much less work than the slowest waits for that one."""


def verdict(traces: Mapping[int, Mapping[str, Any]]) -> str:
    """Return a sentence on the part that limits the speed of the steps, with advice.

    traces : rank → its `Trace.report()`.
    """
    shares = {rank: _shares(trace["seconds"]) for rank, trace in traces.items()}
    rank = max(shares, key=lambda r: shares[r]["wait for data"])
    if shares[rank]["wait for data"] >= _DATA_SHARE:
        return _slow_data(rank, shares[rank]["wait for data"], traces[rank])
    rank = max(shares, key=lambda r: shares[r]["copy to device"])
    if shares[rank]["copy to device"] >= _DATA_SHARE:
        return (
            f"rank {rank} copies to its device {shares[rank]['copy to device']:.0%} of the time: send less (float16, "
            "uint8 images that are scaled on the device)"
        )
    rank = max(shares, key=lambda r: shares[r]["communicate"])
    if shares[rank]["communicate"] >= _EXCHANGE_SHARE:
        return _slow_exchange(rank, shares[rank]["communicate"], traces)
    means = {name: sum(share[name] for share in shares.values()) / len(shares) for name in SECTIONS}
    computing = sum(means[name] for name in ("forward", "backward", "optimizer"))
    if means["other"] > computing:
        return (
            f"{means['other']:.0%} of the time goes into neither data nor model nor exchange: work of the function's "
            "own between them, such as metrics, logging, or preparing batches"
        )
    waits = means["wait for data"]
    return f"the ranks compute {computing:.0%} of the time, and wait for data {waits:.0%}: nothing is in the way"


def _shares(seconds: Mapping[str, float]) -> dict[str, float]:
    whole = sum(seconds.values()) or 1.0
    return {name: seconds.get(name, 0.0) / whole for name in SECTIONS}


def _slow_data(rank: int, share: float, trace: Mapping[str, Any]) -> str:
    head = f"rank {rank} waits for data {share:.0%} of the time: "
    if trace["arrive"] > trace["seconds"]["wait for data"] / 2:
        return head + (
            "Spark's source or shuffle is the bottleneck (rows had yet to arrive). Give the stages before it more "
            "tasks, cache their result, or take more epochs for the same rows"
        )
    return head + (
        "reading its rows is the bottleneck. Are they larger than the host's memory, or is decode= slow? Columns that "
        "are smaller, larger batches, or fewer ranks to a host help"
    )


def _slow_exchange(rank: int, share: float, traces: Mapping[int, Mapping[str, Any]]) -> str:
    head = f"rank {rank} waits for the exchange between ranks {share:.0%} of the time: "
    work = {r: sum(trace["seconds"].values()) - trace["seconds"]["communicate"] for r, trace in traces.items()}
    slowest = max(work, key=lambda r: work[r])
    if work[rank] < work[slowest] * (1 - _LESS_WORK):
        more = {name: s - traces[rank]["seconds"][name] for name, s in traces[slowest]["seconds"].items()}
        section = max(more, key=lambda name: more[name])
        return head + (
            f"rank {slowest} is slower ({work[slowest]:.1f} s of its own work, rank {rank} {work[rank]:.1f} s), most "
            f"of it in {section!r}, and all wait for it"
        )
    return head + "larger batches, gradient_accumulation, or fewer ranks exchange less often"
