"""Hugging Face: transformers and accelerate in a gang, fed from shards (rank)."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from dataclasses import dataclass
from typing import Any

from tritium.errors import BadSetting
from tritium.frameworks.at_import import at_import
from tritium.frameworks.torch import Torch

_LOADERS, _USER = "accelerate.data_loader", "accelerate.accelerator"


@dataclass(frozen=True, kw_only=True)
class HuggingFace(Torch):
    """Hugging Face: `transformers.Trainer` and `accelerate.Accelerator` train data-parallel on all ranks."""

    name = "huggingface"
    modules = ("transformers", "accelerate")
    covers = ("torch", "tokenizers", "datasets")
    install = "transformers accelerate"

    def prepare(self) -> None:
        """Let nothing be downloaded unless the user's environment says so: many ranks would, at once."""
        os.environ.setdefault("HF_HUB_OFFLINE", "1")


def leave_shards() -> None:
    """Let accelerate leave the loader of a shard as it is, under every framework. Call before it is imported.

    It takes what yields batches for the same on every rank, and gives each rank its part of that. A shard's rows are
    this rank's alone: of N ranks, 1/N of all rows would be used.
    """
    at_import(_LOADERS, _leave)


def _leave(module: Any) -> None:
    original = module.prepare_data_loader
    signature = inspect.signature(original)

    @functools.wraps(original)
    def prepare_data_loader(*args: Any, **kwargs: Any) -> Any:
        from tritium.data.torch_dataset import ShardDataset

        given = signature.bind(*args, **kwargs)
        settings = given.arguments
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
        return original(*given.args, **given.kwargs)

    module.prepare_data_loader = prepare_data_loader
    if _USER in sys.modules:
        sys.modules[_USER].prepare_data_loader = prepare_data_loader  # type: ignore[attr-defined]
