"""`LightningSettings`: the settings of a training with Lightning (any process)."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from tritium.arguments import name_of
from tritium.hints import question
from tritium.ml.early_stopping import EarlyStopping
from tritium.ml.epoch_settings import EpochSettings
from tritium.ml.fields import is_whole, setting
from tritium.ml.torch.setting_checks import model_problems

_INSTEAD = {
    "max_epochs": "give epochs=",
    "devices": "give ranks=",
    "num_nodes": "give ranks=",
    "callbacks": "give callbacks=",
    "default_root_dir": "give run_dir=",
    "enable_progress_bar": "give verbose= and progress=",
    "use_distributed_sampler": "leave it out, as every rank has its own rows",
    "overfit_batches": "fit on df.limit(…)",
    "reload_dataloaders_every_n_epochs": "leave it out, as rows come in a new order each epoch",
    "enable_checkpointing": "give checkpoint_every=, and a ModelCheckpoint among callbacks=",
    "fast_dev_run": "fit on df.limit(…) with epochs=1",
    "barebones": "leave it out",
}
_OF_THE_MODULE = " It is the module's: its configure_optimizers() returns it."
_OF_THE_TRAINER = " It is the Trainer's: trainer_args={{{0!r}: …}}."


@dataclass(frozen=True, kw_only=True)
class LightningSettings(EpochSettings):
    """The settings of a training with Lightning: every field is also a Spark ML Param of `LightningEstimator`."""

    framework: ClassVar[str] = "lightning"
    choices: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **EpochSettings.choices,
        "shuffle": ("full", False, True),
        "batch_form": ("tuple", "dict"),
        "check": ("full", "off"),
    }
    hints: ClassVar[Mapping[str, str]] = {
        **EpochSettings.hints,
        **dict.fromkeys(("optimizer", "lr", "learning_rate", "lr_scheduler", "loss", "metrics"), _OF_THE_MODULE),
        "max_epochs": question("epochs"),
        **{
            name: _OF_THE_TRAINER.format(name)
            for name in ("precision", "strategy", "logger", "gradient_clip_val", "accumulate_grad_batches", "profiler")
        },
        "trainer": question("trainer_args"),
    }
    loss_of_numbers: ClassVar[str] = "torch.nn.functional.mse_loss"

    model: Any = setting(
        "A lightning.LightningModule, or a function without arguments that makes one. A function is called in every "
        "rank after torch.manual_seed(seed), and all ranks start from the weights of rank 0. One whose argument is "
        "called vocabulary is given the words of each column of strings, for the size of an embedding. Its forward "
        "predicts.",
        resume="code",
    )
    trainer_args: Mapping[str, Any] | None = setting(
        'Arguments of lightning.Trainer in every rank: {"precision": "bf16-mixed", "gradient_clip_val": 1.0}.',
        None,
        resume="code",
    )
    callbacks: Sequence[Any] = setting(
        "Lightning's callbacks, or your own, in every rank; their states are kept in checkpoints.", (), resume="any"
    )
    batch_form: Literal["tuple", "dict"] = setting(
        'What training_step and validation_step are called with: "tuple": (features, label), with a weight_col '
        "(features, label, weight), where features is a tensor or, for several inputs, a dict, and label a tensor or, "
        'for several labels, a dict; or "dict": all of them by name ("features" and "label" where they have no other).',
        "tuple",
        resume="same",
    )
    weight_col: str | None = setting(
        "A column of weights, which the module is given beside features and label.", None, resume="same"
    )
    initial_weights: Any = setting(
        "The weights to start from, in place of those that the model is made with: a trained model (of fit, or "
        "tr.load), the path of a saved one, a module, or a state_dict. Weights that are not among them stay as made.",
        None,
        resume="code",
    )
    check: Literal["full", "off"] = setting(
        'Whether the model is tried on rows of zeros on the driver, before anything starts ("full"), or not ("off"): '
        "for a model that only runs on a GPU, or is too large for the driver.",
        "full",
        resume="any",
    )
    shuffle: Literal["full"] | bool = setting(
        'The order of rows: "full" (a new permutation each epoch), or False (by row id).', "full", resume="same"
    )
    task: Literal["auto", "regression", "classification"] | None = setting(
        'What predictions are: "regression" (a double for one output, else an array), "classification" (a class '
        'index, with "probability" beside it), or None (arrays). "auto": "regression", as the loss is in the module.',
        "auto",
        resume="same",
    )

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each error of the settings."""
        yield from super().problems()
        yield from model_problems(self.model)
        yield from module_problems(self.model, validates=self.validation is not None)
        yield from _callbacks(self.callbacks)
        yield from _trainer(self.trainer_args)
        yield from _validation(self)
        if self.if_data_changed == "restart":
            yield (
                "if_data_changed='restart' restarts an epoch, and Lightning's own counters would continue in the "
                "middle of it. Train anew, in another run_dir."
            )

    def history_names(self) -> Sequence[str] | None:
        """Return None: the module logs what it likes."""
        return None

    def batches_per_step(self) -> int:
        """Return Lightning's `accumulate_grad_batches`."""
        return int((self.trainer_args or {}).get("accumulate_grad_batches", 1))

    def travelling(self) -> LightningSettings:
        """Return the settings as they are sent to ranks: a module without the Trainer of an earlier fit."""
        return replace(self, model=without_trainer(self.model)) if is_module(self.model) else self

    @property
    def transform(self) -> None:
        """None: the module's own steps change their batches, and its forward its inputs."""
        return None

    @property
    def tries(self) -> bool:
        """Whether the model is tried on rows of zeros before anything starts."""
        return self.check == "full"


def is_module(thing: Any) -> bool:
    """Return whether it is a LightningModule, of lightning or pytorch_lightning."""
    return not isinstance(thing, type) and base_of(type(thing)) is not None


def base_of(kind: type) -> type | None:
    """Return Lightning's own class among the bases of this one; None where there is none."""
    homes = ("lightning", "pytorch_lightning")
    bases = (base for base in kind.__mro__ if base.__name__ == "LightningModule")
    return next((base for base in bases if base.__module__.partition(".")[0] in homes), None)


def defines(kind: type, method: str) -> bool:
    """Return whether a class of modules has a method of its own where Lightning's class has none that does anything."""
    base = base_of(kind)
    return base is not None and getattr(kind, method, None) is not getattr(base, method, None)


def module_problems(module: Any, *, validates: bool) -> Iterator[str]:
    """Yield a sentence for each error of a module; none for a function that makes one."""
    if not is_module(module):
        if hasattr(module, "state_dict") and hasattr(module, "named_parameters") and not isinstance(module, type):
            yield f"model={name_of(module)} is no LightningModule. TorchEstimator trains a torch.nn.Module."
        return
    kind = type(module)
    if str(getattr(base_of(kind), "__module__", "")).startswith("pytorch_lightning"):
        yield (
            f"model={kind.__name__} is a module of pytorch_lightning. Derive it from lightning.LightningModule: "
            "lightning is the same library under its new name."
        )
    if not defines(kind, "training_step"):
        yield f"model={kind.__name__} has no training_step(self, batch, batch_idx), which returns the loss."
    if not defines(kind, "configure_optimizers"):
        yield f"model={kind.__name__} has no configure_optimizers(self)."
    if not defines(kind, "forward"):
        yield f"model={kind.__name__} has no forward, which predicts: def forward(self, features): return …."
    if validates and not defines(kind, "validation_step"):
        yield f"validation= is given, and model={kind.__name__} has no validation_step(self, batch, batch_idx)."


def without_trainer(module: Any) -> Any:
    """Return a copy of the module, without the Trainer that an earlier fit has left in it."""
    held = [vars(part).get(name) for part in module.modules() for name in ("_trainer", "_fabric")]
    return copy.deepcopy(module, dict.fromkeys(id(one) for one in held if one is not None))


def _validation(settings: LightningSettings) -> Iterator[str]:
    rule = settings.stopping_rule() if isinstance(settings.early_stopping, int | EarlyStopping) else None
    if rule is None or settings.validation is None or not str(rule.monitor).startswith("validation_"):
        return
    arguments = settings.trainer_args if isinstance(settings.trainer_args, Mapping) else {}
    for name, usual in (("check_val_every_n_epoch", 1), ("limit_val_batches", 1.0)):
        value = arguments.get(name, usual)
        if value is None or value == 0 or (name == "check_val_every_n_epoch" and value != 1):
            yield (
                f"early_stopping looks at {rule.monitor!r} after each epoch, and trainer_args has {name}={value!r}. "
                'Leave that out, or watch EarlyStopping(monitor="loss").'
            )


def _callbacks(callbacks: Any) -> Iterator[str]:
    if not isinstance(callbacks, list | tuple):
        yield f"callbacks={name_of(callbacks)} must be a list: callbacks=[…]."
        return
    for callback in callbacks:
        if isinstance(callback, type):
            yield f"the callback {name_of(callback)} is a class; give an instance, {name_of(callback)}()."
        elif not hasattr(callback, "on_train_batch_end"):
            yield f"the callback {callback!r:.80} is none of Lightning's; derive it from lightning.Callback."


def _trainer(arguments: Any) -> Iterator[str]:
    if arguments is None:
        return
    if not isinstance(arguments, Mapping):
        yield f"trainer_args={arguments!r:.80} must be a mapping from names of Trainer's arguments to values."
        return
    for name in arguments:
        if name in _INSTEAD:
            yield f"trainer_args has {name!r}, which the estimator sets: {_INSTEAD[name]}."
    if not is_whole(arguments.get("accumulate_grad_batches", 1), 1):
        value = arguments["accumulate_grad_batches"]
        yield f"trainer_args: accumulate_grad_batches={value!r} must be a whole number of at least 1."
    strategy = arguments.get("strategy", "auto")
    shown = strategy if isinstance(strategy, str) else type(strategy).__name__
    known = shown == "auto" or shown.startswith("ddp") or shown in ("DDPStrategy", "SingleDeviceStrategy")
    if not known or any(word in shown for word in ("spawn", "fork", "notebook")):
        yield (
            f"trainer_args: strategy={shown!r} is none with which every rank has the whole model: DDPStrategy(…) or a "
            'name that begins with "ddp". For others, tr.launch(…, framework="lightning") with your own Trainer.'
        )
