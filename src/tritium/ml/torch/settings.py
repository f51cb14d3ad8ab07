"""`TorchSettings`: what and how to train with PyTorch (any process)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from tritium.errors import BadSetting
from tritium.gang.settings import Gang
from tritium.ml.epoch_settings import EpochSettings, callback_problems
from tritium.ml.fields import is_number, is_whole, setting
from tritium.ml.settings import LABEL, labels_are_names
from tritium.ml.torch.compiling import compile_problems
from tritium.ml.torch.setting_checks import (
    DDP_OPTIONS,
    NEEDS_GPUS,
    are_metrics,
    ddp_problems,
    gives_probabilities,
    is_by_class,
    is_of_one_score,
    loss_problems,
    metric_pairs,
    metric_problems,
    model_problems,
    optimizer_problems,
    scheduler_problems,
    step_problems,
    transform_problems,
)

_RATE = " The learning rate is the optimizer's: optimizer=lambda p: torch.optim.Adam(p, lr=1e-3)."


@dataclass(frozen=True, kw_only=True)
class TorchSettings(EpochSettings):
    """What and how to train with PyTorch: every field is also a Spark ML Param of `TorchEstimator`."""

    framework: ClassVar[str] = "torch"
    choices: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **EpochSettings.choices,
        "equal_weights": (True, False),
        "precision": ("fp32", "bf16", "fp16"),
        "check": ("full", "off"),
        "strategy": ("ddp", "fsdp"),
    }
    hints: ClassVar[Mapping[str, str]] = {**EpochSettings.hints, "lr": _RATE, "learning_rate": _RATE}
    whole: ClassVar[tuple[str, ...]] = (*EpochSettings.whole, "gradient_accumulation")
    loss_of_numbers: ClassVar[str] = "torch.nn.MSELoss()"

    model: Any = setting(
        "A torch.nn.Module, or a function without arguments that makes one. A function is called in every rank "
        "after torch.manual_seed(seed), and all ranks start from the weights of rank 0. One whose argument is called "
        "vocabulary is given the words of each column of strings, for the size of an embedding.",
        resume="code",
    )
    initial_weights: Any = setting(
        "The weights to start from, in place of those that the model is made with: a trained model (of fit, or "
        "tr.load), the path of a saved one, a module, or a state_dict. Weights that are not among them stay as made.",
        None,
        resume="code",
    )
    optimizer: Any = setting(
        "A function of the module's parameters: lambda p: torch.optim.Adam(p, lr=1e-3). Or of the module itself, where "
        "its argument is called module or model, or where only that works: for groups of parameters by name. "
        "The learning rate is never scaled with the number of ranks.",
        resume="code",
    )
    loss: Any = setting(
        "A function (output, label) -> mean over the rows of the batch: torch.nn.MSELoss(), "
        "torch.nn.functional.cross_entropy, your own. Where label_cols is a mapping: a mapping from the names of the "
        "labels to such functions, whose sum is minimised and for which the module returns a dict or a tuple; or one "
        "function (output, labels) of a mapping of all labels. Not needed with train_step.",
        None,
        resume="code",
    )
    loss_weights: Mapping[str, float] | None = setting(
        "Label -> the factor of its loss in the sum, where loss is a mapping; 1 for those that are not in it.",
        None,
        resume="same",
    )
    train_step: Any = setting(
        "Your own step: a function (module, batch) -> loss, or (loss, output) if there are metrics. The module is your "
        "own, so its methods can be called, and any of its parameters may be left out. The loss is "
        "the mean over the batch's rows; the batch is a mapping of tensors. It runs for validation too, in eval "
        "mode and without gradients.",
        None,
        resume="code",
    )
    transform: Any = setting(
        "A function (inputs) -> inputs of a batch's tensors by name, on the rank's device, before the module is "
        "called: to normalise, crop, or combine. It may add inputs and leave some out. It is applied in training, "
        "validation and prediction, and is saved with the model. One with a second argument called training gets True "
        "there in the steps of the training alone: for augmentation.",
        None,
        resume="code",
    )
    eval_step: Any = setting(
        "Your own step for validation, where it is another one than that of the training: a function (module, batch) "
        "-> loss, or (loss, output) if there are metrics. The module is in eval mode, without gradients.",
        None,
        resume="any",
    )
    lr_scheduler: Any = setting(
        "A function of the optimizer that makes a scheduler, which is stepped after each epoch "
        "(ReduceLROnPlateau with the validation loss, or else the loss). A function of two arguments (optimizer, "
        "steps) is also given the number of optimizer steps of the whole training, and stepped after each of them.",
        None,
        resume="code",
    )
    gradient_accumulation: int = setting("Batches whose gradients make one optimizer step.", 1, resume="same")
    clip_grad_norm: float | None = setting(
        "The largest L2 norm that all gradients together may have; None: any.", None, resume="same"
    )
    precision: Literal["fp32", "bf16", "fp16"] = setting(
        'What forward and loss compute in: "fp32", or "bf16" or "fp16" (autocast; weights stay float32). With "fp16" '
        "the loss is scaled, and a step whose gradients are not finite is left out, and counted in the history.",
        "fp32",
        resume="same",
    )
    strategy: Literal["ddp", "fsdp"] = setting(
        'How several ranks share a module: "ddp", each holds all of it (DistributedDataParallel), or "fsdp", each '
        "holds a part of every weight, gradient and optimizer state (fully_shard), for models that are too large for "
        "one GPU. The model that is returned is whole.",
        "ddp",
        resume="any",
    )
    ddp_options: Mapping[str, Any] | None = setting(
        "Options of torch's DistributedDataParallel: bucket_cap_mb, static_graph, find_unused_parameters, "
        "broadcast_buffers, gradient_as_bucket_view; sync_batch_norm (True: BatchNorm over the rows of all ranks, on "
        'GPUs); comm_hook ("fp16", "bf16", "power_sgd", a communication hook (state, bucket) -> Future, or '
        "(state, hook)). With one rank there is no DDP, and they do nothing.",
        None,
        resume="code",
    )
    compile: bool | Mapping[str, Any] = setting(
        "Whether the ranks compile the module with torch.compile: True, or a mapping of its options, such as "
        '{"mode": "reduce-overhead"} or {"dynamic": True}. The model that is returned is not compiled.',
        False,
        resume="any",
    )
    check: Literal["full", "off"] = setting(
        'Whether the model is tried on rows of zeros on the driver, before anything starts ("full"), or not ("off"): '
        "for a model that only runs on a GPU, or is too large for the driver.",
        "full",
        resume="any",
    )
    equal_weights: bool = setting(
        "Whether all ranks must hold the same weights, bit for bit, at the end of each epoch. False: for ranks on "
        "different kinds of processors, which round differently; the model has rank 0's weights.",
        True,
        resume="any",
    )
    metrics: Any = setting(
        "Name -> a torchmetrics Metric (synchronised over ranks by torchmetrics), or a function (output, label) "
        "-> mean over the rows of the batch (averaged over all rows of all ranks). A list takes the names of the "
        "functions and classes, a MetricCollection its own.",
        (),
        resume="code",
    )
    callbacks: Sequence[Any] = setting(
        "Objects with the methods of tritium.ml.Callback, called in every rank.", (), resume="any"
    )
    weight_col: str | None = setting(
        "A column of weights. They multiply the per-row losses, and the mean stays over rows (as in Keras). "
        'The loss must offer reduction="none".',
        None,
        resume="same",
    )
    task: Literal["auto", "regression", "classification"] | None = setting(
        'What predictions are: "regression" (a double for one output, else an array), "classification" (a class '
        'index, with "probability" beside it), or None (arrays). "auto": "classification" for one label column with '
        "torch's CrossEntropyLoss, NLLLoss, BCEWithLogitsLoss or BCELoss, and with their functions; else "
        '"regression".',
        "auto",
        resume="same",
    )

    def problems(self) -> Iterator[str]:
        """Yield one sentence for each thing that is wrong."""
        yield from super().problems()
        yield from callback_problems(self.callbacks)
        yield from model_problems(self.model)
        yield from optimizer_problems(self.optimizer)
        if self.loss is None and self.train_step is None:
            yield "there is no loss. Give loss=, or your own train_step=."
        if labels_are_names(self.label_cols):
            several = isinstance(self.label_cols, Mapping)
            yield from loss_problems(self.loss, self.loss_weights, list(self.label_sources()), several=several)
        yield from transform_problems(self.transform)
        yield from step_problems(self.train_step, "train_step", self.weight_col)
        yield from step_problems(self.eval_step, "eval_step", self.weight_col)
        if self.eval_step is not None and self.validation is None:
            yield "eval_step is the step for validation, and there is none: give validation=."
        yield from scheduler_problems(self.lr_scheduler)
        yield from metric_problems(self.metrics)
        yield from ddp_problems(self.ddp_options)
        if self.strategy == "fsdp":
            yield from self._of_ddp()
        yield from compile_problems(self.compile)
        if not is_whole(self.gradient_accumulation, 1):
            yield f"gradient_accumulation={self.gradient_accumulation!r} must be a whole number of at least 1."
        if (clip := self.clip_grad_norm) is not None and not (is_number(clip) and 0 < clip < math.inf):
            yield f"clip_grad_norm={clip!r} must be a number above 0."

    def _of_ddp(self) -> Iterator[str]:
        """Yield the settings that do not go with strategy="fsdp"."""
        options = self.ddp_options if isinstance(self.ddp_options, Mapping) else {}
        if of_ddp := [name for name in options if name in DDP_OPTIONS and name != "sync_batch_norm"]:
            yield f"ddp_options[{of_ddp[0]!r}] is DDP's, and does not go with strategy='fsdp'. Leave it out."
        if self.compile is not False:
            yield f"compile={self.compile!r} does not go with strategy='fsdp'. Leave it out."

    def batches_per_step(self) -> int:
        """Return `gradient_accumulation`."""
        return self.gradient_accumulation

    def check_gang(self, gang: Gang) -> None:
        """Raise BadSetting when a gang can't train with these settings."""
        super().check_gang(gang)
        if gang.most > 1 and not gang.gpus and (self.ddp_options or {}).get("sync_batch_norm"):
            raise BadSetting(NEEDS_GPUS, setting="ddp_options")

    @property
    def tries(self) -> bool:
        """Whether the model is tried on rows of zeros before anything starts."""
        return self.check == "full"

    def named_metrics(self) -> dict[str, Any]:
        """Return metrics by name; those of a MetricCollection by its names for them."""
        return dict(metric_pairs(self.metrics))

    def metric_names(self) -> Sequence[str]:
        """Return the names that metrics have in the history; none where `metrics` is of a wrong kind."""
        return list(self.named_metrics()) if are_metrics(self.metrics) else ()

    def is_of_one_score(self, label: str = LABEL) -> bool:
        """Return whether the loss of this label is torch's own for one score a row against 0 or 1."""
        return is_of_one_score(self.loss.get(label) if isinstance(self.loss, Mapping) else self.loss)

    def is_by_class(self) -> bool:
        """Return whether the loss is torch's own for class indices against a score for each class."""
        return is_by_class(self.loss)

    def gives_probabilities(self) -> bool:
        """Return whether the loss is torch's own for probabilities."""
        return gives_probabilities(self.loss)

    def has_own_step(self) -> bool:
        """Return whether there is a `train_step`."""
        return self.train_step is not None
