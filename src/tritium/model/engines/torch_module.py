"""A torch module without its weights: made by its origin, or pickled with names in their place (any process)."""

from __future__ import annotations

import copy
import io
import pickle
import random
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from tritium import ship
from tritium.definitions import ByValue, loaded_script, saved_script
from tritium.errors import ModelError
from tritium.model.engine import Maker
from tritium.model.engines.torch_weights import as_parameter

if TYPE_CHECKING:
    import torch


def pickled(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Return the module as a pickle in which every tensor of `tensors` is a name, and the user's code is by value."""
    out = io.BytesIO()
    with ship.by_value():
        pickler = _ModulePickler(out)
        pickler.names = {id(tensor): name for name, tensor in tensors.items()}
        pickler.dump(module)
    return out.getvalue()


class _ModulePickler(ByValue):
    names: Mapping[int, str]

    def persistent_id(self, obj: Any) -> str | None:
        return self.names.get(id(obj))

    def script(self, script: Any) -> Any:
        """Return how to make TorchScript again, without those of its weights that have a name."""
        import torch

        if not isinstance(script, torch.jit.ScriptModule):
            return super().script(script)
        state = script.state_dict(keep_vars=True)
        named = {key: tensor for key, tensor in state.items() if id(tensor) in self.names}
        with torch.no_grad():
            bare = copy.deepcopy(script)
        for key, tensor in bare.state_dict(keep_vars=True).items():
            if key in named:  # One number stands for all, as the weights are saved elsewhere.
                tensor.data = torch.zeros([1] * tensor.ndim, dtype=tensor.dtype).expand(tensor.shape)
                tensor.requires_grad_(named[key].requires_grad)  # No copy of TorchScript keeps it.
        return _with_weights, (saved_script(bare), named)


def _with_weights(saved: bytes, named: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """Return the TorchScript module of `saved_script` with these tensors as its weights."""
    script: torch.nn.Module = loaded_script(saved)
    for key, tensor in script.state_dict(keep_vars=True).items():
        if key in named:
            tensor.data = named[key].data
    return script


def frozen(module: torch.nn.Module) -> torch.nn.Module:
    """Let no parameter require a gradient, and return the module. Its own method fails for TorchScript."""
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    return module


class _ModuleUnpickler(pickle.Unpickler):
    def __init__(self, data: bytes, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(io.BytesIO(data))
        self._tensors = tensors

    def persistent_load(self, pid: str) -> torch.Tensor:
        if pid not in self._tensors:
            raise ModelError(f"The weights lack {pid!r}, which the model's code names.")
        return self._tensors[pid]


def unpickled(data: bytes, tensors: Mapping[str, torch.Tensor], trainable: Mapping[str, bool]) -> torch.nn.Module:
    """Return the module of `pickled` over these tensors; `trainable` is the result of the function of that name."""
    import torch

    if not data:
        raise ModelError("The manifest names neither a function that makes the module nor a file with its code.")
    held = {
        name: as_parameter(tensor, trainable[name]) if name in trainable else tensor for name, tensor in tensors.items()
    }
    module = _ModuleUnpickler(data, held).load()
    if not isinstance(module, torch.nn.Module):
        raise ModelError(f"The model's code gave a {type(module).__name__}, no torch.nn.Module.")
    return module


def trainable(tensors: Mapping[str, torch.Tensor]) -> dict[str, bool]:
    """Return, for those of these tensors that are parameters, whether they require a gradient."""
    import torch

    return {n: t.requires_grad for n, t in tensors.items() if isinstance(t, torch.nn.Parameter)}


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch, NumPy and `random` with `seed` for the block, and restore their states afterwards.

    One thread at a time, as the generators are the process's.
    """
    import numpy as np
    import torch

    with _drawing:
        # Until CUDA is initialized it has no state to restore, and to ask for one would initialize it.
        gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
        before = np.random.get_state(), random.getstate()
        with torch.random.fork_rng(devices=gpus):
            torch.manual_seed(seed)
            np.random.seed(seed % 2**32)
            random.seed(seed)
            try:
                yield
            finally:
                np.random.set_state(before[0])
                random.setstate(before[1])


_drawing = threading.RLock()  # A function that makes a module may load another one, so it is reentrant.


def rebuild(maker: Maker, tensors: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """Call the maker of the module, and replace the weights that it made with these tensors.

    Generators are seeded as in training, since not all random numbers that the maker draws need be in its state.
    Raises ModelError where the maker fails, or the weights do not fit.
    """
    import torch

    origin = maker.origin
    try:
        with seeded(maker.seed) if maker.seed is not None else nullcontext():
            module = maker.make()
    except Exception as error:
        what = "can't be called without arguments" if isinstance(error, TypeError) else "raised when it was called"
        raise ModelError(f"The model is made by {origin!r}, which {what}: {type(error).__name__}: {error}.") from error
    if not isinstance(module, torch.nn.Module):
        raise ModelError(f"{origin!r} gave a {type(module).__name__}, no torch.nn.Module.")
    new_weights = module.state_dict(keep_vars=True)
    try:
        # One parameter for all names of a tensor, so that tied weights stay tied: torch would make one for each name.
        parameters = {
            id(tensor): torch.nn.Parameter(tensor, requires_grad=new_weights[name].requires_grad)
            for name, tensor in tensors.items()
            if isinstance(new_weights.get(name), torch.nn.Parameter)
        }
        held = {name: parameters.get(id(tensor), tensor) for name, tensor in tensors.items()}
        module.load_state_dict(held, assign=True)
    except RuntimeError as error:
        raise ModelError(
            f"The weights don't fit what {origin!r} makes now: {error}. Was it changed since the model was saved?"
        ) from error
    return module
