"""The part of the dry run that calls a module on rows of zeros, as it trains and as it predicts (driver, rank)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tritium.arguments import name_of
from tritium.data.schema import Field
from tritium.errors import BadData, BadSetting, TritiumError
from tritium.ml.backend import DryRun, S
from tritium.ml.dry_run import text_of
from tritium.ml.settings import WEIGHT
from tritium.ml.torch.module import ModuleSettings, note_of_others
from tritium.ml.torch.step import forward
from tritium.model.engines.torch_outputs import by_name, named_outputs, outputs_of
from tritium.model.engines.torch_transform import InputTransform
from tritium.model.signature import Output

ROWS = 2
_ALONE = "The model's forward takes two rows in eval mode, in which it predicts, and given one row alone "

Shapes = Mapping[str, tuple[int, ...]]


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
    """Lines for the user about weights that initial_weights does not have."""

    @property
    def scores(self) -> tuple[int, ...] | None:
        """The shape of a row of the output; None where it is not one tensor."""
        return tuple(self.output.shape[1:]) if isinstance(self.output, torch.Tensor) else None


class ModuleDryRun(DryRun[S]):
    """The part of a dry run that tells what `forward` has shown of the module."""

    _forward: Forward | None
    """None where the module could not be called."""

    @property
    def scores(self) -> tuple[int, ...] | None:
        """The shape of a row of the output; None where it is not known, or not one tensor."""
        return None if self._forward is None else self._forward.scores

    @property
    def outputs(self) -> tuple[Output, ...] | None:
        """The outputs of the module in eval mode; None where it could not be called."""
        return None if self._forward is None else self._forward.outputs

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for the user about weights that initial_weights does not have."""
        return () if self._forward is None else self._forward.notes


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
        # The inputs of a step of the user's need not be what forward takes.
        taken = try_transform(settings, fields, inputs, module, training=not settings.has_own_step())
        try:
            output = forward(module.train(), taken, list(taken))
        except Exception as error:
            raise _wrong_inputs(settings, fields, module, taken, error) from error
        outputs = _try_prediction(settings, fields, inputs, module)
        module.train()
    notes = () if settings.initial_weights is None else note_of_others(module, settings.initial_weights)
    return Forward(module, inputs, output, outputs, fields, notes)


def _refuse_script(module: torch.nn.Module) -> None:
    """Raise BadSetting where weights of TorchScript would be trained: a copy of it has none that an optimizer takes."""
    scripts = (part for part in module.modules() if isinstance(part, torch.jit.ScriptModule))
    if any(weight.requires_grad for script in scripts for weight in script.parameters()):
        raise BadSetting(
            "the model is a torch.jit.ScriptModule, or holds one with weights to train. Give the module itself, "
            "and script the trained one: tr.Model(torch.jit.script(model.model.module), model.signature).",
            setting="model",
        )


def _wrong_inputs(
    settings: ModuleSettings,
    fields: Mapping[str, Field],
    module: torch.nn.Module,
    taken: Mapping[str, torch.Tensor],
    error: Exception,
) -> BadData:
    """Return the error for a module that fails with these inputs, with the line to write where one is known."""
    listed = "".join(f"\n  - {_with_source(settings, fields, name, value)}" for name, value in taken.items())
    flat = [name for name, value in taken.items() if value.ndim == 1 and settings.transform is None]
    only = len(flat) == len(settings.inputs()) == 1
    hint = f"\nFor [batch, 1] give a list: feature_cols=[{fields[flat[0]].sources[0]!r}]." if only else ""
    hint = line_to_write(settings, fields, module, taken) or hint
    return BadData(
        f"The model's forward can't take these features: {text_of(error)}\nIt was called with{listed}{hint}",
        shapes={name: tuple(value.shape[1:]) for name, value in taken.items()},
    )


def _try_prediction(
    settings: ModuleSettings, fields: Mapping[str, Field], inputs: Mapping[str, torch.Tensor], module: torch.nn.Module
) -> tuple[Output, ...]:
    """Return what the module returns in eval mode, in which it validates and predicts, and leave it in this mode.

    Raises BadData where it fails, or gives no row for each row, also for one row alone: a batch of a stream may have
    one, and the last one of an epoch.
    """
    module.eval()

    def predict(rows: int) -> Any:
        first = {name: value[:rows] for name, value in inputs.items()}
        taken = try_transform(settings, fields, first, module, training=False)
        with torch.no_grad():
            return forward(module, taken, list(taken))

    try:
        output = predict(ROWS)
    except TritiumError:
        raise
    except Exception as error:
        raise BadData(
            f"The model's forward fails in eval mode, in which it validates and predicts: {text_of(error)}"
        ) from error
    outputs = outputs_of(output)
    shapes = {name: list(value.shape) for name, value in named_outputs(output).items()}
    for name, (rows, *_) in shapes.items():
        if rows != ROWS:
            raise BadData(
                f"The model's forward returns {shapes[name]} for a batch of {ROWS} rows in eval mode ({name}), in "
                "which it predicts. Let it return a row for each row."
            )
    try:
        alone = {name: list(value.shape) for name, value in by_name(predict(1)).items()}
    except Exception as error:
        raise BadData(f"{_ALONE}it fails: {text_of(error)}. A batch may have one row.") from error
    for name, (_, *row) in shapes.items():
        if alone.get(name) != [1, *row]:
            raise BadData(
                f"{_ALONE}it returns {alone.get(name)}, not {[1, *row]} ({name}). A batch may have one row: name the "
                "dimension that goes, squeeze(-1), not squeeze()."
            )
    return outputs


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
        listed = "".join(f"\n  - {fields[name].described(shape_of(value))}" for name, value in inputs.items())
        raise BadData(
            f"transform={name_of(settings.transform)} can't take these features: {text_of(error)}\nIt was called with "
            f"a mapping of{listed}\nThese were rows of zeros; check='off' leaves this trial out."
        ) from error


# ---- zeros, and how they are described


def zeros(field: Field, shape: tuple[int, ...]) -> torch.Tensor:
    """Return two rows `[2, *shape]` of zeros of this batch column."""
    return torch.zeros((ROWS, *shape), dtype=getattr(torch, field.dtype))


def _with_source(settings: ModuleSettings, fields: Mapping[str, Field], name: str, value: torch.Tensor) -> str:
    """Return an input of the module as text, with where it comes from."""
    if settings.transform is None:
        return fields[name].described(shape_of(value))
    return f"{name} {shape_of(value)} of transform={name_of(settings.transform)}"


def shape_of(value: torch.Tensor) -> str:
    """Return shape and dtype as text: `[batch, 3] float32`."""
    shape = ", ".join(["batch", *map(str, value.shape[1:])])
    return f"[{shape}] {str(value.dtype).removeprefix('torch.')}"


# ---- the line to write where a module does not take its inputs


@dataclass(frozen=True)
class Change:
    """An input that is made of the one there is, and how: an expression of `x`, or what to do before."""

    value: torch.Tensor
    expression: str = ""
    before: str = ""


def line_to_write(
    settings: ModuleSettings, fields: Mapping[str, Field], module: torch.nn.Module, inputs: Mapping[str, torch.Tensor]
) -> str:
    """Return a line with what to write so that the module takes its inputs; "" where no simple change helps.

    Spoils the statistics of the module's buffers.
    """
    for name, value in inputs.items():
        field = fields.get(name) if settings.transform is None else None
        for change in (*_of_type(field, value), *_of_shape(module, value)):
            if _takes(module, {**inputs, name: change.value}):
                how = change.before or _place(settings, name, change.expression)
                return f"\nIt takes {name} as {shape_of(change.value)}: {how}."
    return ""


def _takes(module: torch.nn.Module, inputs: Mapping[str, torch.Tensor]) -> bool:
    try:
        with torch.no_grad():
            forward(module, inputs, list(inputs))
    except Exception:  # noqa: BLE001 - any error: it does not
        return False
    return True


def _place(settings: ModuleSettings, name: str, expression: str) -> str:
    """Return where the user puts an expression of an input: a setting, or the module where there is none for it."""
    if "transform" not in settings.fields():
        return f"in forward, {name} = {expression.format(name)}"
    if settings.transform is not None:
        return f"let transform return {expression.format(name)}"
    before = "" if len(settings.inputs()) == 1 else "**x, "
    return f"transform=lambda x: {{{before}{name!r}: {expression.format(f'x[{name!r}]')}}}"


def _of_type(field: Field | None, value: torch.Tensor) -> Iterator[Change]:
    """Yield the input as integers where it is floats, and as floats where it is integers, or of another precision.

    field : where it comes from; None where a transform makes it.
    """
    if value.dtype in (torch.float64, torch.float16):
        yield Change(value.float(), "{}.float()")
    if value.is_floating_point() and field is None:
        yield Change(value.long(), "{}.long()")
    elif value.is_floating_point() and field is not None:
        column = field.sources[0]
        whole = value.long()
        if field.kind == "bytes":
            yield Change(whole, before=f"let decode return integers, np.asarray(…, np.int64), for {column!r}")
        elif field.packed:
            columns = ", ".join(map(repr, field.sources))
            yield Change(
                whole,
                before="columns that are packed become floats; make one array of integers, "
                f"df.withColumn('ids', F.array({columns}).cast('array<bigint>')), and give feature_cols='ids'",
            )
        else:
            array = f"vector_to_array({column!r})" if field.marked else f"F.col({column!r})"
            spark_type, pandas_type = ("bigint", "int") if value.ndim == 1 else ("array<bigint>", "lists of int")
            cast = f"df.withColumn({column!r}, {array}.cast({spark_type!r}))"
            yield Change(whole, before=f"{cast} in Spark, {pandas_type} in pandas")
    elif value.dtype == torch.uint8:
        yield Change(value.float(), "{} / 255")
    else:
        yield Change(value.float(), "{}.float()")
        if value.ndim == 1 and field is not None:
            yield Change(value.float()[:, None], before=f"give feature_cols=[{field.sources[0]!r}]")


def _of_shape(module: torch.nn.Module, value: torch.Tensor) -> Iterator[Change]:
    """Yield images with their channels first, and rows of numbers as images, channels or sequences."""
    scale = " / 255" if value.dtype == torch.uint8 else ""
    if value.ndim == 4:
        yield Change(value.permute(0, 3, 1, 2).float(), f"{{}}.permute(0, 3, 1, 2){scale}")
    if value.ndim == 3:
        yield Change(value[:, None].float(), f"{{}}[:, None]{scale}")
    if value.ndim != 2:
        return
    length = value.shape[1]
    for layer in module.modules():
        if isinstance(layer, torch.nn.Conv2d):
            side = math.isqrt(length // layer.in_channels)
            if layer.in_channels * side * side == length:
                shape = (layer.in_channels, side, side)
                yield Change(value.reshape(-1, *shape).float(), f"{{}}.unflatten(1, {shape})")
            break
    yield Change(value[:, None].float(), "{}[:, None]")
    yield Change(value[:, :, None].float(), "{}[:, :, None]")
