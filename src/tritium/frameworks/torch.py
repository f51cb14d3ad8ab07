"""PyTorch: import and prepare it in a rank (rank), and choose dtypes for functions that use it (driver)."""

from __future__ import annotations

import functools
import itertools
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from tritium.frameworks.at_import import at_import
from tritium.frameworks.framework import Framework, Place
from tritium.frameworks.torch_memory import sharing

if TYPE_CHECKING:
    from tritium.data.schema import Data
    from tritium.observe.trace import Trace

PACKAGE = "torch"
_GROUPS = "torch.distributed.distributed_c10d"


@dataclass(frozen=True, kw_only=True)
class Torch(Framework):
    """PyTorch: `torch.distributed.init_process_group()` works without arguments, by torchrun's variables."""

    name = "torch"
    modules: ClassVar[tuple[str, ...]] = (PACKAGE,)
    install = "torch"
    tensors = True
    secondary = re.compile(
        r"gloo/transport|connectFullMesh|nccl(Remote|System|Internal|UnhandledCuda)Error|"
        r"NCCL (watchdog|communicator was)|remote process exit|Dist(Network|Store)Error",
        re.IGNORECASE,
    )

    def run(self, place: Place, function: Callable[[], Any]) -> Any:
        """Call the function, in which `tritium.torch.host_memory` works."""
        with sharing(place):
            return function()

    def threads(self, cpus: int | None) -> AbstractContextManager[None]:
        """Return a context in which torch uses `cpus` threads."""
        return threads(cpus)

    def trace(self, trace: Trace) -> None:
        """Measure forward, backward, collectives and optimizer."""
        from tritium.frameworks.torch_trace import hook

        hook(trace)


def reading(data: Data) -> Data:
    """Return `data` with floating columns read as float32, unless it has a `default_dtype`.

    float32 is torch's default dtype: float64 inputs raise an error in a module with float32 weights.
    """
    return data if data.default_dtype is not None else replace(data, default_dtype="float32")


def keep_groups() -> None:
    """Keep destroyed process groups in memory until this process exits, also of a torch that is imported later.

    Gloo's destructor joins its threads. A DDP module that is freed after `destroy_process_group()`, as in most training
    functions, calls it with the GIL held, for which one of those threads may be waiting: a deadlock (torch 2.13, CPU:
    in 3 launches out of 4). A rank exits without destructors.

    The store of a kept group is kept too, so every later rendezvous at MASTER_PORT gets a prefix of its own.
    """
    at_import(_GROUPS, _keep)


def _keep(c10d: Any) -> None:
    if not hasattr(c10d, "destroy_process_group"):  # This torch was built without distributed.
        return
    destroy = c10d.destroy_process_group
    kept: list[Any] = []

    @functools.wraps(destroy)
    def destroy_process_group(group: Any = None) -> None:
        kept.extend(c10d._world.pg_map if group is None else [group])
        destroy(group)

    c10d.destroy_process_group = destroy_process_group
    handlers = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers
    meet, meetings = handlers["env"], itertools.count()

    def meet_under_new_names(url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
        for store, rank, size in meet(url, **options):
            yield c10d.PrefixStore(f"meeting {next(meetings)}", store), rank, size

    handlers["env"] = meet_under_new_names


@contextmanager
def threads(cpus: int | None) -> Iterator[None]:
    """Let torch use `cpus` threads within the block. Does nothing for None, or where torch is not imported."""
    torch = sys.modules.get(PACKAGE)
    if cpus is None or torch is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(cpus)
    try:
        yield
    finally:
        torch.set_num_threads(before)
