"""Hugging Face: transformers and accelerate in a gang, fed from shards (rank)."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tritium.errors import BadSetting
from tritium.frameworks.at_import import at_import
from tritium.frameworks.framework import Place
from tritium.frameworks.torch import Torch

_STATE, _LOADERS, _USER = "accelerate.state", "accelerate.data_loader", "accelerate.accelerator"
_CPU = "ACCELERATE_USE_CPU"


@dataclass(frozen=True, kw_only=True)
class HuggingFace(Torch):
    """Hugging Face: `transformers.Trainer` and `accelerate.Accelerator` train data-parallel on all ranks."""

    name = "huggingface"
    modules = ("transformers", "accelerate")
    covers = ("torch", "tokenizers", "datasets")
    install = "transformers accelerate"

    def prepare(self, *, gpus: bool) -> None:
        """Forbid downloads unless the user's environment allows them, as many ranks would download at once."""
        os.environ.setdefault("HF_HUB_OFFLINE", "1")

    def run(self, place: Place, function: Callable[[], Any]) -> Any:
        """Call the function. On CPUs, accelerate connects processes only where it is told to use CPUs."""
        if place.device == "cpu":
            os.environ.setdefault(_CPU, "true")
        return super().run(place, function)


def refuse_alone(size: int) -> None:
    """Let accelerate raise BadSetting where it takes this process for the only one, as it does on CPUs by itself.

    Each of `size` ranks would train a model of its own.
    """
    at_import(_STATE, functools.partial(_refuse_alone, size))


def _refuse_alone(size: int, module: Any) -> None:
    original = module.PartialState.__init__

    @functools.wraps(original)
    def __init__(self: Any, cpu: bool = False, **kwargs: Any) -> None:
        original(self, cpu or os.environ.get(_CPU, "").lower() in ("1", "true", "yes"), **kwargs)
        if self.num_processes != size:
            raise BadSetting(
                f"accelerate has found {self.num_processes} process, and this gang has {size} ranks: each would train "
                'by itself. Launch with framework="huggingface"; on CPUs, use_cpu=True does the same.',
                setting="framework",
            )

    module.PartialState.__init__ = __init__


def leave_shards() -> None:
    """Let accelerate leave the loader of a shard as it is, under every framework. Call before it is imported.

    By itself accelerate takes a loader to yield the same batches on every rank, and gives each rank a part of them. A
    shard's rows are this rank's alone, so that of N ranks only 1/N of all rows would be used.
    """
    at_import(_LOADERS, _leave)


def _leave(module: Any) -> None:
    original = module.prepare_data_loader
    signature = inspect.signature(original)

    @functools.wraps(original)
    def prepare_data_loader(*args: Any, **kwargs: Any) -> Any:
        from tritium.data.views.torch import ShardDataset

        bound = signature.bind(*args, **kwargs)
        settings = bound.arguments
        if not isinstance(getattr(settings["dataloader"], "dataset", None), ShardDataset):
            return original(*args, **kwargs)
        for name in ("dispatch_batches", "split_batches"):
            if settings.get(name):
                raise BadSetting(
                    f"accelerate's {name}=True splits the batches of one rank among all, and the rows of a shard are "
                    f"dealt to the ranks already. Leave {name} out.",
                    setting=name,
                )
        alone = {"num_processes": 1, "process_index": 0, "dispatch_batches": False, "torch_device_mesh": None}
        settings.update((name, value) for name, value in alone.items() if name in signature.parameters)
        return original(*bound.args, **bound.kwargs)

    module.prepare_data_loader = prepare_data_loader
    if _USER in sys.modules:
        sys.modules[_USER].prepare_data_loader = prepare_data_loader  # type: ignore[attr-defined]
