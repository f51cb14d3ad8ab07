"""Copies of a torch module on other devices, kept between calls (any process)."""

from __future__ import annotations

import copy
import threading
from typing import TYPE_CHECKING, Any

from tritium.model.engines.torch_module import frozen, pickled

if TYPE_CHECKING:
    import torch


class Copies:
    """One copy of a module for each device that it was called on, with its weights updated at each call.

    Weights are overwritten without a comparison: to read 500 MB for it takes longer than to send them to a GPU. A copy
    is made again when anything else of the module has changed (a layer, an attribute, a hook). A module that can't be
    pickled (one with parametrizations) is copied at each call, as its changes can't be seen.
    """

    def __init__(self) -> None:
        self._held: dict[str, tuple[Any, torch.nn.Module]] = {}
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> Copies:
        return Copies()

    def __reduce__(self) -> tuple[type[Copies], tuple[()]]:
        return Copies, ()  # The copies may be on devices that the reader lacks.

    def on(self, device: torch.device, module: torch.nn.Module) -> torch.nn.Module:
        """Return the copy of `module` on `device`, in eval mode, with the current weights of `module`."""
        import torch

        tensors = _tensors(module)
        form = _form(module, tensors)
        with self._lock:
            known, copied = self._held.get(str(device), (None, None))
            if copied is None or form is None or known != form:
                with torch.no_grad():  # Else weights of TorchScript become results, with a gradient of their own.
                    copied = frozen(copy.deepcopy(module).eval())
                copied.zero_grad(set_to_none=True)  # The GPU needs not hold them.
                copied = copied.to(device)
                if form is not None:
                    self._held[str(device)] = (form, copied)
                return copied
            with torch.no_grad():
                for target, source in zip(_tensors(copied).values(), tensors.values(), strict=True):
                    target.copy_(source)
            return copied


def _form(module: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> Any:
    """Return a value that identifies all of a module but the values of its weights; None where it can't be pickled."""
    try:
        code = pickled(module, tensors)
    except Exception:  # noqa: BLE001 - pickling may raise any error, and each means only that it failed
        return None
    return [(name, tensor.shape, tensor.dtype, tensor.layout) for name, tensor in tensors.items()], code


def _tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return every parameter and buffer by name, each once, also those that are not saved."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}
