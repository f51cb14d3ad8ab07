"""The user's function on the inputs of a torch module, applied before the module is called (any process)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from tritium.errors import BadSetting

if TYPE_CHECKING:
    import torch

TRAINING = "training"


def takes_training(function: Callable[..., Any]) -> bool:
    """Return whether a transform has an argument called `training` after the inputs."""
    try:
        return TRAINING in list(inspect.signature(function).parameters)[1:]
    except (TypeError, ValueError):  # Some builtins have no signature.
        return False


class InputTransform:
    """A transform, which checks the tensors that the function returns.

    The function runs without gradients, in training as in prediction: no tensor that it uses is trained.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._takes_training = takes_training(function)

    def __call__(
        self,
        inputs: Mapping[str, torch.Tensor],
        *,
        training: bool,
        module: torch.nn.Module | None = None,
        taken: Collection[str] = (),
    ) -> dict[str, torch.Tensor]:
        """Return the tensors `[rows, …]` by name that the function makes of these `[rows, …]`.

        module : the module that is called with them, by keyword where there are several; None: its names are free.
        taken  : the names of a batch's other columns.

        Raises BadSetting for anything else than a mapping of tensors with as many rows.
        """
        import torch

        rows, names = len(next(iter(inputs.values()))), list(inputs)
        with torch.no_grad():
            tensors = self._function(dict(inputs), **({TRAINING: training} if self._takes_training else {}))
        if isinstance(tensors, torch.Tensor) and len(names) == 1:
            tensors = {names[0]: tensors}
        if not isinstance(tensors, Mapping) or not tensors or not all(isinstance(name, str) for name in tensors):
            one = ", or one tensor" if len(names) == 1 else ""
            raise self._error(f"returned {_shown(tensors)}; it must return a mapping from names to tensors{one}")
        for name, value in tensors.items():
            if not isinstance(value, torch.Tensor):
                raise self._error(f"returned {_shown(value)} for {name!r}; it must return tensors")
            if value.ndim == 0 or len(value) != rows:
                raise self._error(
                    f"returned {name!r} with the shape {list(value.shape)} for a batch of {rows} rows; a tensor needs "
                    f"as many rows: [{rows}, …]"
                )
            if name in taken:
                raise self._error(f"returned {name!r}, as a batch calls another column; choose another name")
        if module is not None and len(tensors) > 1:
            self._check_names(list(tensors), module)
        return dict(tensors)

    def _check_names(self, names: list[str], module: torch.nn.Module) -> None:
        try:
            inspect.signature(module.forward).bind(**dict.fromkeys(names))
        except TypeError as error:
            raise self._error(
                f"returned {', '.join(map(repr, names))}, and the module's forward, which gets them by keyword, can't "
                f"take these: {error}"
            ) from error
        except ValueError:  # The signature of a compiled module may be unknown.
            return

    def _error(self, what: str) -> BadSetting:
        name = getattr(self._function, "__name__", type(self._function).__name__)
        return BadSetting(f"transform={name} {what}.", setting="transform")


def _shown(value: Any) -> str:
    if value is None or isinstance(value, Mapping):
        return f"{value!r:.200}"
    shape = f" and shape {list(value.shape)}" if hasattr(value, "shape") else ""
    return f"a value of type {type(value).__name__}{shape}"
