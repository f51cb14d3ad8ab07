"""`compile`: what is wrong with it, and torch.compile of a module in place (any process)."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tritium.errors import BadSetting
from tritium.hints import suggest

if TYPE_CHECKING:
    import torch

COMPILED = (
    "a module of torch.compile, whose weights have other names, and which can't be pickled. Give the module itself, "
    "with compile=True."
)
_INDUCTOR = "inductor"
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "mode": ((str, type(None)), "a name"),
    "backend": ((str,), "a name or a function"),
    "fullgraph": ((bool,), "True or False"),
    "dynamic": ((bool, type(None)), "True, False or None"),
    "options": ((Mapping, type(None)), "a mapping"),
}


def compile_problems(setting: Any) -> Iterator[str]:
    """Yield what is wrong with `compile`."""
    if isinstance(setting, bool):
        return
    if not isinstance(setting, Mapping):
        yield f'compile={setting!r} must be True, False, or a mapping of torch.compile\'s options: {{"dynamic": True}}.'
        return
    for name, value in setting.items():
        if name not in _KINDS:
            yield f"compile has no option {name!r}.{suggest(str(name), _KINDS)}"
            continue
        kinds, named = _KINDS[name]
        if not isinstance(value, kinds) and not (name == "backend" and callable(value)):
            yield f"compile[{name!r}] is {value!r}, and must be {named}."
    if setting.get("mode") is not None and setting.get("options") is not None:
        yield "compile: torch.compile takes mode or options, not both."


def is_compiled(model: Any) -> bool:
    """Return whether `model` is what torch.compile returned. Its weights have other names, and it can't be pickled."""
    return type(model).__name__ == "OptimizedModule" and hasattr(model, "_orig_mod")


def compile_in_place(module: torch.nn.Module, setting: Any, device: torch.device) -> None:
    """Let calls of the module be compiled, if `compile` says so; its class, weights and their names stay.

    Nothing is compiled before the first call. Raises BadSetting for options that torch.compile does not take, and where
    it would find no C++ compiler.
    """
    if setting is False:
        return
    options = {} if setting is True else {k: dict(v) if isinstance(v, Mapping) else v for k, v in setting.items()}
    options |= _apart()
    try:
        with warnings.catch_warnings():
            # Torch's compiler imports torch.jit, which warns.
            warnings.simplefilter("ignore", DeprecationWarning)
            module._compiled_call_impl = _compiled(module, options)
    except Exception as error:
        raise BadSetting(
            f"torch.compile does not take compile={setting!r}: {type(error).__name__}: {error}", setting="compile"
        ) from error
    if device.type == "cpu" and options.get("backend", _INDUCTOR) == _INDUCTOR:
        _refuse_missing_compiler()


def _compiled(module: torch.nn.Module, options: dict[str, Any]) -> Any:
    """Return calls of the module, compiled. `Module.compile` leaves out layers of torch's own (2.13), as Sequential."""
    import torch

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    return torch.compile(call, **options)


def _apart() -> dict[str, bool]:
    """Return the option by which the trainings of a process do not share one limit of recompilations (torch 2.13)."""
    import torch

    return dict.fromkeys({"isolate_recompiles"} & set(inspect.signature(torch.compile).parameters), True)


def _refuse_missing_compiler() -> None:
    """Raise BadSetting where torch's compiler finds no C++ compiler for the CPU."""
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler as error:
        raise BadSetting(
            f"compile needs a C++ compiler on every executor, and there is none here: {error} Install g++ there, name "
            'one in the environment (env={"CXX": "/path/to/g++"}), or leave out compile.',
            setting="compile",
        ) from error


def try_compile(module: torch.nn.Module, setting: Any) -> None:
    """Raise BadSetting for options that torch.compile does not take. The module stays as it is."""
    if setting is False:
        return
    import torch

    compile_in_place(module, setting, torch.device("meta"))  # The driver compiles nothing.
    module._compiled_call_impl = None


@contextmanager
def uncompiled(module: torch.nn.Module) -> Iterator[None]:
    """Call the module as it is written, within the block: for a single batch of a size of its own."""
    compiled = module._compiled_call_impl
    module._compiled_call_impl = None
    try:
        yield
    finally:
        module._compiled_call_impl = compiled
