"""PyTorch: what a rank imports before the user's function runs, while its supervisor spools its shard (rank).

And how rows are read for a function that uses it (driver).
"""

from __future__ import annotations

import functools
import importlib
import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tritium.frameworks.at_import import at_import
from tritium.frameworks.torch_dynamo import wait_for_compile

if TYPE_CHECKING:
    from tritium.data.schema import Data

PACKAGE = "torch"
_GROUPS = "torch.distributed.distributed_c10d"


def load() -> None:
    """Import torch. Raises ImportError where it is missing."""
    importlib.import_module(PACKAGE)


def prepare() -> None:
    """Before anyone imports torch: what it would do at a bad time, it does not, or later."""
    wait_for_compile()
    keep_groups()


def reading(data: Data) -> Data:
    """How the rows of `data` are read for a function that uses torch: floating columns as float32, unless it says so.

    float32 is torch's own default dtype: a double in a batch meets float32 weights in an error.
    """
    return data if data.default_dtype is not None else replace(data, default_dtype="float32")


def keep_groups() -> None:
    """From now on, whoever imports torch: a process group that is destroyed is left alone until the process ends.

    The destructor of Gloo's joins its threads, and a DDP module that is freed after `destroy_process_group()`, as most
    training functions do when they return, calls it with the interpreter's lock held, for which one of those threads
    may be waiting: for ever (torch 2.13, CPU: in 3 launches out of 4). A rank ends without destructors.

    The store that a group met at stays with it, so each group that meets at MASTER_PORT gets names of its own there.
    """
    at_import(_GROUPS, _keep)


def _keep(c10d: Any) -> None:
    if not hasattr(c10d, "destroy_process_group"):  # a torch that was built without distributed
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
    """Let torch compute with `cpus` threads in the block. Does nothing for None, or where torch is not imported."""
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
