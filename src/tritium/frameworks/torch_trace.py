"""Measure torch's parts of a step: forward, backward, collectives, optimizer (rank)."""

from __future__ import annotations

import functools
import sys
from typing import Any

from tritium.frameworks.host_memory import HostMemory
from tritium.observe.trace import Section, Trace

_COLLECTIVES = (
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single"),
    *("barrier", "broadcast", "broadcast_object_list", "gather", "gather_object", "recv", "reduce", "reduce_scatter"),
    *("reduce_scatter_tensor", "scatter", "send"),
)


def hook(trace: Trace) -> None:
    """Install hooks that report to `trace`. Does nothing where the user's function has not imported torch."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    replicas: dict[int, Any] = {}
    parallel, call, sections = torch.nn.parallel.DistributedDataParallel, torch.nn.Module.__call__, trace.inside

    # With hooks, torch goes a longer way through every module, of 3 µs: half of the cost of a trace.
    @functools.wraps(call)
    def measured(module: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(module, parallel) and id(module) not in replicas:
            replicas[id(module)] = module
            module._set_ddp_runtime_logging_sample_rate(1)  # By itself DDP measures every hundredth step.
        if sections and sections[-1] == "forward":
            return call(module, *args, **kwargs)
        with trace.within("forward"):
            return call(module, *args, **kwargs)

    from torch.optim import optimizer as optimizers

    torch.nn.Module.__call__ = measured
    optimizers.register_optimizer_step_pre_hook(lambda *_: trace.enter("optimizer"))
    optimizers.register_optimizer_step_post_hook(lambda *_: trace.leave("optimizer"))
    torch.autograd.backward = within(trace, "backward", torch.autograd.backward)
    if torch.distributed.is_available():
        for name in _COLLECTIVES:
            if hasattr(torch.distributed, name):
                setattr(torch.distributed, name, within(trace, "communicate", getattr(torch.distributed, name)))
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        trace.synchronize = torch.cuda.synchronize
    HostMemory.mean = within(trace, "communicate", HostMemory.mean)  # type: ignore[method-assign]
    trace.waited_in_backward = lambda: sum(map(_waited, replicas.values()))


def within(trace: Trace, section: Section, function: Any) -> Any:
    """Return the function, with its time counted in this section."""

    @functools.wraps(function)
    def measured(*args: Any, **kwargs: Any) -> Any:
        with trace.within(section):
            return function(*args, **kwargs)

    return measured


def _waited(replica: Any) -> float:
    """Return the seconds of DDP's gradient exchange that did not overlap with computation, by DDP's own clock."""
    measured = replica._get_ddp_logging_data()
    nanoseconds_a_step = measured.get("avg_backward_comm_time", 0) - measured.get(
        "avg_backward_compute_comm_overlap_time", 0
    )
    return float(max(0, nanoseconds_a_step)) * 1e-9 * float(measured.get("iteration", 0))
