"""Finds the line to write where a module does not take its inputs, by calling it with others (driver, rank)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from tritium.data.schema import Field
from tritium.ml.torch.module import ModuleSettings
from tritium.ml.torch.step import forward


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
                dims = ", ".join(["batch", *map(str, change.value.shape[1:])])
                dtype = str(change.value.dtype).removeprefix("torch.")
                how = change.before or _written(settings, name, change.expression)
                return f"\nIt takes {name} as [{dims}] {dtype}: {how}."
    return ""


def _takes(module: torch.nn.Module, inputs: Mapping[str, torch.Tensor]) -> bool:
    try:
        with torch.no_grad():
            forward(module, inputs, list(inputs))
    except Exception:  # noqa: BLE001 - any error: it does not
        return False
    return True


def _written(settings: ModuleSettings, name: str, expression: str) -> str:
    """Return where the user puts an expression of an input: a setting, or the module where there is none for it."""
    if "transform" not in settings.fields():
        return f"in forward, {name} = {expression.format(name)}"
    if settings.transform is not None:
        return f"let transform return {expression.format(name)}"
    before = "" if len(settings.inputs()) == 1 else "**x, "
    made = expression.format(f"x[{name!r}]")
    return f"transform=lambda x: {{{before}{name!r}: {made}}}"


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
            made = f"F.col({column!r})" if not field.marked else f"vector_to_array({column!r})"
            cast = f"df.withColumn({column!r}, {made}.cast('array<bigint>'))"
            yield Change(whole, before=f"{cast} in Spark, lists of int in pandas")
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
