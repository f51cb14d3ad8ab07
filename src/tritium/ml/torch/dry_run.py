"""The dry run: a step of training on two rows of zeros, before anything starts (driver)."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tritium.arguments import name_of
from tritium.data.batch import Batch
from tritium.data.schema import Field
from tritium.errors import BadData, BadSetting, TritiumError
from tritium.ml.backend import DryRun
from tritium.ml.dry_run import needs_rank, text_of
from tritium.ml.settings import WEIGHT
from tritium.ml.torch.compiling import try_compile
from tritium.ml.torch.ddp_options import refuse_unused
from tritium.ml.torch.input_advice import line_to_write
from tritium.ml.torch.module import ModuleSettings, make_module, note_of_others
from tritium.ml.torch.settings import TorchSettings
from tritium.ml.torch.step import Step, forward, make_step
from tritium.ml.torch.try_functions import WITHOUT, try_metrics, try_optimizer, try_scheduler
from tritium.model.engines.torch_outputs import by_name, named_outputs, outputs_of
from tritium.model.engines.torch_transform import InputTransform
from tritium.model.signature import Output

_ROWS = 2
_CPU = torch.device("cpu")
_ALONE = "The model's forward takes two rows in eval mode, in which it predicts, and given one row alone "

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Facts:
    """The result of the dry run for the ranks."""

    find_unused_parameters: bool = True
    """Whether some parameters got no gradient, or may get none in some step, so that DDP must not wait for them."""
    output_known: bool = False
    """Whether the module's output has been seen; it is not where the length of an array column is unknown."""
    tried: bool = False
    """Whether the step has been tried, too; it is not where the length of a label is unknown."""
    alone: str = ""
    """The error with which the module fails in training for a batch of one row; "" where it does not."""


class TorchDryRun(DryRun[TorchSettings]):
    """A module on zeros; nothing is run where the shape of an input is not known before the first row."""

    def __init__(self, settings: TorchSettings, fields: Mapping[str, Field], shapes: Shapes) -> None:
        """Call the module. Raises BadData with the shapes when it does not take them."""
        known = settings.check == "full" and set(settings.inputs()) <= set(shapes)
        self._forward = try_forward(make_module, settings, fields, shapes) if known else None

    @property
    def scores(self) -> tuple[int, ...] | None:
        """The shape of a row of the output; None where it is not known, or not one tensor."""
        return None if self._forward is None else self._forward.scores

    @property
    def outputs(self) -> tuple[Output, ...] | None:
        """What the module returns in eval mode; None where it could not be called."""
        return None if self._forward is None else self._forward.outputs

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for the user about weights that initial_weights does not have."""
        return () if self._forward is None else self._forward.notes

    def train(
        self, settings: TorchSettings, labels: Mapping[str, Field], shapes: Mapping[str, tuple[int, ...] | None]
    ) -> Facts:
        """Make optimizer and scheduler, and compute the gradients of a loss. Raises BadSetting and BadData."""
        if self._forward is None:
            return Facts()
        try_compile(self._forward.module, settings.compile)
        if settings.strategy == "fsdp":
            from tritium.ml.torch.fsdp import refuse_unshardable  # with DTensor, whose import takes 1 s

            refuse_unshardable(self._forward.module)
        if settings.train_step is None:
            refuse_frozen(settings, self._forward.module)
        optimizer = try_optimizer(settings, self._forward.module)
        try_scheduler(settings, optimizer)
        zero = {name: zeros(label, shape) for name, label in labels.items() if (shape := shapes[name]) is not None}
        if len(zero) < len(labels):
            return Facts(output_known=True)
        if settings.eval_step is not None:
            try_own_step(settings, self._forward, zero, "eval_step")
        if settings.train_step is not None:  # one step shows nothing of the next: it may leave out other layers
            try_own_step(settings, self._forward, zero)
            return Facts(output_known=True, tried=True)
        unused = try_step(settings, self._forward, labels, zero)
        refuse_unused(settings.ddp_options, unused)
        over_ranks = (settings.ddp_options or {}).get("sync_batch_norm")  # then a rank's one row is not alone
        alone = "" if over_ranks else failure_alone(settings, self._forward)
        return Facts(find_unused_parameters=bool(unused), output_known=True, tried=True, alone=alone)


@dataclass(frozen=True)
class Forward:
    """A module, its inputs `[2, …]` before the transform, and its output for them."""

    module: torch.nn.Module
    inputs: dict[str, torch.Tensor]
    output: Any
    outputs: tuple[Output, ...]
    """Those of eval mode, as the signature has them."""
    fields: Mapping[str, Field]
    notes: tuple[str, ...] = ()

    @property
    def scores(self) -> tuple[int, ...] | None:
        """The shape of a row of the output; None where it is not one tensor."""
        return tuple(self.output.shape[1:]) if isinstance(self.output, torch.Tensor) else None


def try_forward(
    make: Callable[[Any], torch.nn.Module], settings: ModuleSettings, fields: Mapping[str, Field], shapes: Shapes
) -> Forward:
    """Call a new module with zeros.

    make : returns the module of the settings.

    Raises BadSetting if it can't be made, BadData with the shapes if it fails.
    """
    with torch.random.fork_rng(devices=[]):
        try:
            module = make(settings).cpu()
        except TritiumError:
            raise
        except Exception as error:
            raise BadSetting(f"model={name_of(settings.model)} could not be made: {text_of(error)}") from error
        lazy = [n for n, p in module.named_parameters() if isinstance(p, torch.nn.UninitializedParameter)]
        if lazy:
            raise BadSetting(f"the model has lazy layers ({lazy[0]}, …): an optimizer needs their sizes; give them.")
        _refuse_script(module)
        inputs = {name: zeros(fields[name], shapes[name]) for name in settings.inputs()}
        # With a step of one's own, what it gets need not be what forward takes.
        taken = try_transform(settings, fields, inputs, module, training=not settings.has_own_step())
        try:
            output = forward(module.train(), taken, list(taken))
        except Exception as error:
            listed = "".join(f"\n  - {_given(settings, fields, *one)}" for one in taken.items())
            flat = [name for name, value in taken.items() if value.ndim == 1 and settings.transform is None]
            only = len(flat) == len(inputs) == 1
            hint = f"\nFor [batch, 1] give a list: feature_cols=[{fields[flat[0]].sources[0]!r}]." if only else ""
            hint = line_to_write(settings, fields, module, taken) or hint
            raise BadData(
                f"The model's forward can't take these features: {text_of(error)}\nIt was called with{listed}{hint}",
                shapes={name: tuple(value.shape[1:]) for name, value in taken.items()},
            ) from error
        outputs = try_prediction(settings, fields, inputs, module)
        module.train()
    notes = () if settings.initial_weights is None else note_of_others(module, settings.initial_weights)
    return Forward(module, inputs, output, outputs, fields, notes)


def _refuse_script(module: torch.nn.Module) -> None:
    """Raise BadSetting where weights of TorchScript would be trained: a copy of it has none that an optimizer takes."""
    scripts = (one for one in module.modules() if isinstance(one, torch.jit.ScriptModule))
    if any(weight.requires_grad for script in scripts for weight in script.parameters()):
        raise BadSetting(
            "the model is a torch.jit.ScriptModule, or holds one with weights to train. Give the module itself, "
            "and script the trained one: tr.Model(torch.jit.script(model.model.module), model.signature).",
            setting="model",
        )


def failure_alone(settings: ModuleSettings, tried: Forward) -> str:
    """Return the error with which a module fails in train mode for one row, as BatchNorm does; "" where it does not."""
    try:
        row = {name: value[:1] for name, value in tried.inputs.items()}
        taken = try_transform(settings, tried.fields, row, tried.module, training=True)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            forward(tried.module.train(), taken, list(taken))
    except Exception as error:  # noqa: BLE001 - it matters only where there is such a batch
        return text_of(error)
    return ""


def try_prediction(
    settings: ModuleSettings, fields: Mapping[str, Field], inputs: Mapping[str, torch.Tensor], module: torch.nn.Module
) -> tuple[Output, ...]:
    """Return what the module returns in eval mode, in which it validates and predicts, and leave it in this mode.

    Raises BadData where it fails, or gives no row for each row, also for one row alone: a batch of a stream may have
    one, and the last one of an epoch.
    """
    module.eval()

    def predicted(rows: int) -> Any:
        given = {name: value[:rows] for name, value in inputs.items()}
        taken = try_transform(settings, fields, given, module, training=False)
        with torch.no_grad():
            return forward(module, taken, list(taken))

    try:
        output = predicted(_ROWS)
    except TritiumError:
        raise
    except Exception as error:
        raise BadData(
            f"The model's forward fails in eval mode, in which it validates and predicts: {text_of(error)}"
        ) from error
    outputs = outputs_of(output)
    found = {name: list(value.shape) for name, value in named_outputs(output).items()}
    if wrong := [name for name, shape in found.items() if shape[0] != _ROWS]:
        raise BadData(
            f"The model's forward returns {found[wrong[0]]} for a batch of {_ROWS} rows in eval mode ({wrong[0]}), in "
            "which it predicts. Let it return a row for each row."
        )
    try:
        alone = {name: list(value.shape) for name, value in by_name(predicted(1)).items()}
    except Exception as error:
        raise BadData(f"{_ALONE}it fails: {text_of(error)}. A batch may have one row.") from error
    for name, (_, *row) in found.items():
        if alone.get(name) != [1, *row]:
            raise BadData(
                f"{_ALONE}it returns {alone.get(name)}, not {[1, *row]} ({name}). A batch may have one row: name the "
                "dimension that goes, squeeze(-1), not squeeze()."
            )
    return outputs


def try_transform(
    settings: ModuleSettings,
    fields: Mapping[str, Field],
    inputs: Mapping[str, torch.Tensor],
    module: torch.nn.Module | None,
    *,
    training: bool,
) -> dict[str, torch.Tensor]:
    """Return what `transform` makes of zeros, which are left as they are.

    module : the module whose forward takes the result; None: a step of the user's takes it.

    Raises BadData where the function fails, BadSetting for what no module takes.
    """
    if settings.transform is None:
        return dict(inputs)
    copies = {name: value.clone() for name, value in inputs.items()}
    taken = {*settings.label_sources(), WEIGHT}
    try:
        return InputTransform(settings.transform)(copies, training=training, module=module, taken=taken)
    except TritiumError:
        raise
    except Exception as error:
        listed = "".join(f"\n  - {described(fields[name], value)}" for name, value in inputs.items())
        raise BadData(
            f"transform={name_of(settings.transform)} can't take these features: {text_of(error)}\nIt was called with "
            f"a mapping of{listed}\nThese were rows of zeros; check='off' leaves this trial out."
        ) from error


def refuse_frozen(settings: TorchSettings, module: torch.nn.Module) -> None:
    """Raise BadSetting for a module of which no parameter requires a gradient."""
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise BadSetting(
            f"model={name_of(settings.model)} has no weights to train: none of its parameters requires a gradient. "
            "Unfreeze some of them: layer.requires_grad_(True)."
        )


def try_step(
    settings: TorchSettings, tried: Forward, labels: Mapping[str, Field], zero: Mapping[str, torch.Tensor]
) -> list[str]:
    """Compute loss and gradients for zeros, and return the names of the parameters that got no gradient.

    Raises BadData when output and label don't fit, BadSetting when the loss can't be used.
    """
    batch = {**tried.inputs, **zero, WEIGHT: torch.ones(_ROWS)}
    try:  # a loss with buffers, which counts its calls, say, begins in the ranks as it was given
        loss = copy.deepcopy(settings.loss)
    except Exception:  # noqa: BLE001 - one that holds a result of autograd, say, can't be copied
        loss = settings.loss
    step = make_step(dataclasses.replace(settings, model=tried.module, loss=loss), _CPU)
    try:
        returned = _take_step(step, tried.module, batch)
    except TritiumError:
        raise
    except Exception as error:
        output = tried.output
        if not isinstance(output, torch.Tensor):
            raise BadData(_several(settings, output, error)) from error
        gives = f"[{_dims(output)}] {_dtype(output)}"
        listed = "".join(f"\n  - {described(label, zero[name])}" for name, label in labels.items())
        advice = "".join(_advice(label, zero[name]) for name, label in labels.items()) if len(labels) == 1 else ""
        raise BadData(
            f"loss={name_of(settings.loss)} can't take what there is: {text_of(error)}\nIt was called with"
            f"\n  - the module's output {gives}{listed}{advice}"
        ) from error
    _refuse_sparse(settings, tried.module)
    try_metrics(settings, returned, batch)
    return [n for n, p in tried.module.named_parameters() if p.requires_grad and p.grad is None]


def _take_step(step: Step, module: torch.nn.Module, batch: Any, *, gradients: bool = True) -> Any:
    """Compute loss and gradients, restore the random state of this process, and return the step's output."""
    with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(gradients):
        loss, output = step(module, batch)
        if gradients:
            loss.backward()  # type: ignore[no-untyped-call]
    return output


def try_own_step(
    settings: TorchSettings, tried: Forward, zero: Mapping[str, torch.Tensor], name: str = "train_step"
) -> None:
    """Take a `train_step` or `eval_step` on zeros. Does nothing where that fails, e.g. as it uses collectives.

    Raises BadSetting when it asks for a batch column that does not exist, has an error that no values explain, or makes
    gradients that can't be clipped.
    """
    validates = name == "eval_step"
    with torch.random.fork_rng(devices=[]):
        inputs = try_transform(settings, tried.fields, tried.inputs, None, training=not validates)
    columns = {**inputs, **zero}
    batch = _AskedBatch(columns, scale=1.0, rows=_ROWS, total=_ROWS, step=0, epoch=0)
    step = make_step(dataclasses.replace(settings, model=tried.module, transform=None), _CPU, validates=validates)
    try:
        output = _take_step(step, tried.module.train(not validates), batch, gradients=not validates)
    except TritiumError:
        raise
    except Exception as error:
        if isinstance(error, KeyError) and batch.missing is not None and error.args == (batch.missing,):
            raise BadSetting(
                f"{name} asks for batch[{batch.missing!r}], and a batch has {', '.join(map(repr, batch))}. "
                "Inputs have the names that feature_cols gives them ('features' where it is no mapping), or those that "
                "a transform gives."
            ) from error
        by_no_value = isinstance(error, TypeError | AttributeError | NameError)
        if by_no_value and not settings.callbacks and not needs_rank(error):  # a callback may prepare the module
            given = name_of(getattr(settings, name))
            raise BadSetting(f"{name}={given} fails: {text_of(error)}. {WITHOUT}", setting=name) from error
        return
    finally:
        tried.module.train()
    _refuse_sparse(settings, tried.module)
    try_metrics(settings, output, batch)


def _refuse_sparse(settings: TorchSettings, module: torch.nn.Module) -> None:
    """Raise BadSetting for gradients that can't be clipped, or that a hook of DDP can't exchange."""
    sparse = [n for n, p in module.named_parameters() if p.grad is not None and p.grad.is_sparse]
    if sparse and (settings.ddp_options or {}).get("comm_hook") is not None:
        raise BadSetting(
            f"{sparse[0]!r} has sparse gradients, which no comm_hook exchanges. Give its embedding sparse=False, or "
            "leave out comm_hook.",
            setting="ddp_options",
        )
    if settings.clip_grad_norm is not None and sparse:
        raise BadSetting(
            f"{sparse[0]!r} has sparse gradients, of which clip_grad_norm can't take the norm. Give its embedding "
            "sparse=False, or leave out clip_grad_norm.",
            setting="clip_grad_norm",
        )


class _AskedBatch(Batch):
    """A batch that records which column it was asked for and does not have."""

    __slots__ = ("missing",)

    def __init__(self, columns: dict[str, Any], **what: Any) -> None:
        super().__init__(columns, **what)
        self.missing: str | None = None

    def __getitem__(self, name: str) -> Any:
        try:
            return super().__getitem__(name)
        except KeyError:
            self.missing = name
            raise


def zeros(field: Field, shape: tuple[int, ...]) -> torch.Tensor:
    """Return two rows `[2, *shape]` of zeros of this batch column."""
    return torch.zeros((_ROWS, *shape), dtype=getattr(torch, field.dtype))


def described(field: Field, value: torch.Tensor) -> str:
    """Return a batch column as text: `label [batch, 1] float32 of column 'cnt'`."""
    names = ", ".join(map(repr, field.sources[:8])) + (", …" if len(field.sources) > 8 else "")
    return f"{field.name} [{_dims(value)}] {_dtype(value)} of column{'s' * (len(field.sources) > 1)} {names}"


def _given(settings: ModuleSettings, fields: Mapping[str, Field], name: str, value: torch.Tensor) -> str:
    """Return an input of the module as text, with where it comes from."""
    if settings.transform is None:
        return described(fields[name], value)
    return f"{name} [{_dims(value)}] {_dtype(value)} of transform={name_of(settings.transform)}"


def _several(settings: TorchSettings, output: Any, error: Exception) -> str:
    """Return the message for a loss that can't take the several tensors which the module returns."""
    kind = type(output).__name__
    article = "an" if kind[0] in "AEIOU" else "a"
    listed = "".join(f"\n  - {name} [{_dims(value)}] {_dtype(value)}" for name, value in named_outputs(output).items())
    pick = f"output[{next(iter(output))!r}]" if isinstance(output, Mapping) else "output[0]"
    return (
        f"The module returns {article} {kind} of {len(output)}, and loss={name_of(settings.loss)} can't take it: "
        f"{text_of(error)}{listed}\nReturn the one tensor from forward, or give a loss that picks it: "
        f"loss=lambda output, label: your_loss({pick}, label)."
    )


def _advice(field: Field, label: torch.Tensor) -> str:
    if label.is_floating_point():
        return '\nFor classes, give an integer label column, or task="classification" with a score per class.'
    column = field.sources[0]
    return (
        f"\nOne integer column means class indices. For a number to predict, cast {column!r} to double "
        f"(df[{column!r}].astype(float) in pandas)."
    )


def _dims(value: torch.Tensor) -> str:
    return ", ".join(["batch", *map(str, value.shape[1:])])


def _dtype(value: torch.Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")
