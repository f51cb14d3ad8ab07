"""Postpone the import of torch's compiler until it is used; it takes almost as long as that of torch (rank).

torch (2.13) imports `torch._dynamo` at the first use of an optimizer and of DDP: to exclude some of their functions
from tracing, to break its graph around an optimizer step, and to read DDP's setting. Before it is imported nothing is
traced, there is no graph, and the setting is the default: until then all three are answered here. `torch.compile`, and
any other use, imports it as usual, and from then on torch's own code runs.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from weakref import WeakSet

from tritium.frameworks.at_import import at_import

_DYNAMO = "torch._dynamo"
_DISABLED = "__dynamo_disable"  # the attribute of a function in which torch keeps its untraced version


def wait_for_compile() -> None:
    """Let torch import its compiler only when something is compiled. Call before torch is imported."""
    present: list[bool] = []  # a list, as the compiler can trace what asks it
    marked: WeakSet[Any] = WeakSet()

    def loaded(_: ModuleType) -> None:
        present.append(True)
        for function in list(marked):
            _unmark(function)

    at_import(_DYNAMO, loaded)  # first: it may be there already
    at_import("torch._compile", functools.partial(_mark, marked, present))
    at_import("torch.optim.optimizer", functools.partial(_step_without, present))
    at_import("torch", functools.partial(_stand_in, present))


@contextlib.contextmanager
def without_compiler() -> Iterator[None]:
    """Make optimizers without importing torch's compiler, within the block, where torch is imported already."""
    optimizers = sys.modules.get("torch.optim.optimizer")
    function = getattr(getattr(optimizers, "Optimizer", None), "add_param_group", None)
    inner = getattr(function, "__wrapped__", None)
    if _DYNAMO in sys.modules or inner is None or hasattr(inner, _DISABLED):
        yield
        return
    setattr(inner, _DISABLED, inner)
    try:
        yield
    finally:
        _unmark(inner)


def _unmark(function: Any) -> None:
    if vars(function).get(_DISABLED) is function:
        delattr(function, _DISABLED)


def _mark(marked: WeakSet[Any], present: list[bool], module: ModuleType) -> None:
    """Mark functions that must not be traced as their own untraced versions, while the compiler is not imported."""
    original = getattr(module, "_disable_dynamo", None)
    if original is None:
        return

    @functools.wraps(original)
    def _disable_dynamo(fn: Any = None, recursive: bool = True) -> Any:
        made = original(fn, recursive)  # before the mark, of which it would keep a copy
        if fn is not None and not present:
            with contextlib.suppress(AttributeError, TypeError):  # it takes no attributes: torch's own way is used
                marked.add(fn)
                setattr(fn, _DISABLED, fn)
                if present:  # another thread has just imported it
                    _unmark(fn)
        return made

    module._disable_dynamo = _disable_dynamo  # type: ignore[attr-defined]


def _step_without(present: list[bool], module: ModuleType) -> None:
    """Call an optimizer's step without graph breaks, while the compiler is not imported."""
    original = getattr(module, "_use_grad_for_differentiable", None)
    if original is None:
        return

    def _use_grad_for_differentiable(func: Callable[..., Any]) -> Callable[..., Any]:
        whole = original(func)

        @functools.wraps(func)
        def step(*args: Any, **kwargs: Any) -> Any:
            if present:
                return whole(*args, **kwargs)
            with module.torch.set_grad_enabled(args[0].defaults["differentiable"]):
                return func(*args, **kwargs)

        return step

    module._use_grad_for_differentiable = _use_grad_for_differentiable  # type: ignore[attr-defined]


def _stand_in(present: list[bool], module: ModuleType) -> None:
    """Put a stand-in for `torch._dynamo` into torch until it is imported: DDP reads one setting from it."""
    if present:
        return

    def get_optimize_ddp_mode() -> str:
        if not present:
            return "ddp_optimizer"
        return str(importlib.import_module(utils.__name__).get_optimize_ddp_mode())

    utils = _Later(f"{_DYNAMO}.utils", get_optimize_ddp_mode=get_optimize_ddp_mode)
    module._dynamo = _Later(_DYNAMO, utils=utils)  # type: ignore[attr-defined]


class _Later(ModuleType):
    """A module with a few attributes that imports the real one for all others."""

    def __init__(self, name: str, **attributes: Any) -> None:
        super().__init__(name)
        vars(self).update(attributes)

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(importlib.import_module(self.__name__), name, value)
