"""How far a rank has come in its collectives: torch's, and means in shared memory (rank).

It is read when a gang stalls. torch's Flight Recorder has numbered the collectives of every process group until then.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

_SHAPES_SHOWN = 3


def counts(size: int) -> Iterator[dict[str, Any]]:
    """Yield the fields of a `gang.coordinator.collective_calls.CollectiveCalls` for each group of ranks, as JSON.

    size : the number of ranks of the gang.
    """
    memory = getattr(sys.modules.get("tritium.frameworks.host_memory"), "HostMemory", None)
    if memory is not None and memory.newest is not None:
        calls, waits = memory.newest.calls
        yield {
            "group": "shared memory",
            "ranks": list(range(size)),
            "called": calls,
            "waits": calls if waits else None,
            "name": "mean of gradients",
        }
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    recorders = sys.modules.get("torch._C._distributed_c10d")
    # No public function of torch tells these; a torch without one of them gives no counts.
    configs: list[dict[str, Any]] = getattr(c10d, "_get_all_pg_configs", list)()
    members = {str(config["pg_name"]): list(config["ranks"]) for config in configs}
    for recorder in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):  # Of all others, and of NCCL.
        if (dump := getattr(recorders, recorder, None)) is not None:
            yield from of_recorder(json.loads(dump()), members)


def of_recorder(record: Mapping[str, Any], members: Mapping[str, list[int]]) -> Iterator[dict[str, Any]]:
    """Yield the same for the contents of a Flight Recorder.

    members : the ranks of each process group, by its name.
    """
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for entry in record.get("entries", ()):
        backend = entry["profiling_name"].partition(":")[0]
        if not entry["is_p2p"]:
            groups.setdefault((backend, entry["process_group"][0]), []).append(entry)
    for (backend, group), entries in groups.items():
        waits = next((entry for entry in entries if not entry["retired"] and entry["state"] != "completed"), None)
        shown = waits or entries[-1]
        tensors = [f"{kind} {size}" for kind, size in zip(shown["input_dtypes"], shown["input_sizes"], strict=False)]
        more = f" and {len(tensors) - _SHAPES_SHOWN} more" if len(tensors) > _SHAPES_SHOWN else ""
        shapes = f" of {', '.join(tensors[:_SHAPES_SHOWN])}{more}" if tensors else ""
        yield {
            "group": f"{backend} {group}",
            "ranks": members.get(group, []),
            "called": entries[-1]["collective_seq_id"],
            "waits": waits and waits["collective_seq_id"],
            "name": f"{shown['profiling_name'].rpartition(':')[2]}{shapes}",
        }
