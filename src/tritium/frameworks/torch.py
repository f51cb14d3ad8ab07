"""PyTorch: what a rank imports before the user's function runs, while its supervisor spools its shard (rank)."""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

PACKAGE = "torch"
# What torch imports at the first use of an optimizer and of DDP: most of a second, better spent before the first step.
_LATER = ("torch.distributed", "torch.nn.parallel", "torch._dynamo")
_GROUPS = "torch.distributed.distributed_c10d"


def load() -> None:
    """Import torch. Raises ImportError where it is missing."""
    importlib.import_module(PACKAGE)
    for name in _LATER:
        with contextlib.suppress(ImportError):  # a torch that was built without it does not need it either
            importlib.import_module(name)


def keep_groups() -> None:
    """From now on, whoever imports torch: a process group that is destroyed is left alone until the process ends.

    The destructor of Gloo's joins its threads, and a DDP module that is freed after `destroy_process_group()`, as most
    training functions do when they return, calls it with the interpreter's lock held, for which one of those threads
    may be waiting: for ever (torch 2.13, CPU: in 3 launches out of 4). A rank ends without destructors.

    The store that a group met at stays with it, so each group that meets at MASTER_PORT gets names of its own there.
    """
    if _GROUPS in sys.modules:
        _keep(sys.modules[_GROUPS])
    else:
        sys.meta_path.insert(0, _AtImport())


class _AtImport(MetaPathFinder):
    """Sees that module as it is loaded: before others take its functions by name, and without loading torch itself."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _GROUPS:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _keep(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


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
