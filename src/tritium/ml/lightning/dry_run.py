"""The dry run: a step of training on two rows of zeros, before anything starts (driver)."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import lightning
import torch

from tritium.arguments import argument_names, name_of, refuse_methods
from tritium.data.schema import Field
from tritium.errors import BadData, BadSetting
from tritium.hints import suggest
from tritium.ml.dry_run import needs_rank, text_of
from tritium.ml.lightning.batches import in_form
from tritium.ml.lightning.module import make_module
from tritium.ml.lightning.settings import LightningSettings, defines
from tritium.ml.settings import WEIGHT
from tritium.ml.torch.dry_run_forward import ModuleDryRun, Shapes, failure_alone, shape_of, try_forward, zeros

_ROWS = 2
_BEFORE = ("setup", "prepare_data", "configure_model", "on_fit_start", "on_train_start", "on_train_epoch_start")
_PACKAGES = ("lightning", "pytorch_lightning")  # Their callbacks prepare nothing that a module asks for.
_BEFORE_EACH = (
    "on_train_batch_start",
    "transfer_batch_to_device",
    "on_before_batch_transfer",
    "on_after_batch_transfer",
)


@dataclass(frozen=True)
class LightningFacts:
    """The result of the dry run for the ranks."""

    tried: bool = False
    """Whether the module has been tried; it is not where the length of an array column is unknown."""
    alone: str = ""
    """The error with which the module's forward fails in training for a batch of one row; "" where it does not."""


class LightningDryRun(ModuleDryRun[LightningSettings]):
    """A module on zeros; nothing is run where the shape of an input is not known before the first row."""

    def __init__(self, settings: LightningSettings, fields: Mapping[str, Field], shapes: Shapes) -> None:
        """Call the module. Raises BadData with the shapes when it does not take them, BadSetting for the Trainer's."""
        refuse_unknown(settings)
        refuse_methods(settings.callbacks, lightning.Callback, optional=False)
        known = settings.check == "full" and set(settings.inputs()) <= set(shapes)
        self._forward = try_forward(make_module, settings, fields, shapes) if known else None

    def train(
        self, settings: LightningSettings, labels: Mapping[str, Field], shapes: Mapping[str, tuple[int, ...] | None]
    ) -> LightningFacts:
        """Call training_step where that is possible without a Trainer. Raises BadData with the shapes if it fails."""
        if self._forward is None:
            return LightningFacts()
        _try_optimizers(settings, self._forward.module)
        zero = {name: zeros(label, shape) for name, label in labels.items() if (shape := shapes[name]) is not None}
        if len(zero) == len(labels):
            weight = {} if settings.weight_col is None else {WEIGHT: torch.ones(_ROWS)}
            _try_step(settings, self._forward.module, {**self._forward.inputs, **zero, **weight}, labels)
        # With sync_batchnorm, BatchNorm sees the rows of all ranks.
        over_ranks = (settings.trainer_args or {}).get("sync_batchnorm")
        return LightningFacts(len(zero) == len(labels), "" if over_ranks else failure_alone(settings, self._forward))


def refuse_unknown(settings: LightningSettings) -> None:
    """Raise BadSetting for an argument that Trainer does not have."""
    known = list(inspect.signature(lightning.Trainer.__init__).parameters)[1:]
    for name in settings.trainer_args or {}:
        if name not in known:
            raise BadSetting(
                f"trainer_args has {name!r}, and lightning.Trainer has no such argument.{suggest(str(name), known)}",
                setting="trainer_args",
            )


def _try_optimizers(settings: LightningSettings, module: Any) -> None:
    """Raise BadSetting where `configure_optimizers` fails without the help of a Trainer, hooks or other ranks."""
    prepares = any(callback.setup.__module__.partition(".")[0] not in _PACKAGES for callback in settings.callbacks)
    if prepares or any(defines(type(module), hook) for hook in _BEFORE):
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module.configure_optimizers()
    except Exception as error:
        if "rainer" in str(error) or needs_rank(error):
            return
        raise BadSetting(
            f"configure_optimizers of {name_of(module)} fails: {text_of(error)}. check='off' leaves this trial out.",
            setting="model",
        ) from error


def _try_step(settings: LightningSettings, module: Any, columns: dict[str, Any], labels: Mapping[str, Field]) -> None:
    kind = type(module)
    if any(defines(kind, hook) for hook in (*_BEFORE, *_BEFORE_EACH)) or not module.automatic_optimization:
        return  # The step may need the effects of these hooks, or the Trainer's optimizers.
    arguments = [in_form(settings, columns), 0][: len(argument_names(module.training_step)) or 2]
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Lightning warns that there is no Trainer to log to.
            module.training_step(*arguments)
    except Exception as error:
        if "Trainer" in str(error):  # The step asks for the Trainer that it will have.
            return
        listed = "".join(f"\n  - {label.described(shape_of(columns[name]))}" for name, label in labels.items())
        inputs = "".join(f"\n  - {name} {list(columns[name].shape)}" for name in settings.inputs())
        raise BadData(
            f"training_step of {name_of(module)} fails: {text_of(error)}\nIt was called with "
            f"batch_form={settings.batch_form!r}, of two rows of zeros:{inputs}{listed}"
        ) from error
