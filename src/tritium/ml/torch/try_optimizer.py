"""The part of the dry run that makes the optimizer and the scheduler (driver)."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from tritium.errors import TritiumError
from tritium.frameworks.torch_dynamo import without_compiler
from tritium.ml.torch.settings import TorchSettings

_STEPS = 100  # assumed for a scheduler: the real number depends on the rows


def try_optimizer(settings: TorchSettings, module: torch.nn.Module) -> Any:
    """Return the optimizer of a module; None where it can't be made here, e.g. as only the ranks have its library.

    Raises BadSetting when `optimizer` returns something else.
    """
    try:
        with without_compiler():
            return settings.make_optimizer(module)
    except TritiumError:
        raise
    except Exception:  # noqa: BLE001 - any error: the ranks make one, too, and report it
        return None


def try_scheduler(settings: TorchSettings, optimizer: Any) -> None:
    """Raise BadSetting when `lr_scheduler` makes something that can't be stepped. Spoils `optimizer` for other uses."""
    if settings.lr_scheduler is None or optimizer is None:
        return
    try:
        with without_compiler(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            settings.make_scheduler(optimizer, *([_STEPS] if settings.scheduler_per_step() else []))
    except TritiumError:
        raise
    except Exception:  # noqa: BLE001 - _STEPS may be too few for it: the ranks make one for the real number
        return
