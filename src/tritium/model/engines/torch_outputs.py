"""The results of a torch module as outputs of a signature (any process)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tritium.errors import BadData
from tritium.model.signature import Output


def outputs_of(output: Any) -> tuple[Output, ...]:
    """Return the result of a module as outputs of a signature. Raises BadData as `named_outputs` does."""
    return tuple(Output(name, *row) for name, row in rows_like(named_outputs(output)).items())


def by_name(output: Any) -> dict[str, Any]:
    """Return the result of a module by name, whatever it is."""
    if isinstance(output, Mapping):
        return {str(name): value for name, value in output.items()}
    if isinstance(output, tuple | list):
        return {f"output_{i}": value for i, value in enumerate(output)}
    return {"prediction": output}


def named_outputs(output: Any) -> dict[str, torch.Tensor]:
    """Return the tensors that a module returned, by name. Raises BadData where they can't be predictions."""
    if not isinstance(output, torch.Tensor | Mapping | tuple | list):
        raise BadData(
            f"In eval mode, as prediction calls it, the module returns a {type(output).__name__}. Let it return a "
            "tensor, or a tuple or a dict of tensors."
        )
    outputs = by_name(output)
    for name, value in outputs.items():
        if not isinstance(value, torch.Tensor):
            what = "None" if value is None else f"a {type(value).__name__}"
            raise BadData(
                f"In eval mode, as prediction calls it, the module returns a {type(output).__name__} whose {name} is "
                f"{what}. Let it return tensors alone there, and leave the rest out (module.training tells the modes)."
            )
        if value.ndim == 0:
            raise BadData(
                f"In eval mode, as prediction calls it, the module returns one number for the whole batch ({name} has "
                "no row). Let forward return a row of output for each row, and compute the loss in loss= or train_step."
            )
    return outputs


def rows_like(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dtype and shape of a row of each tensor."""
    return {n: (str(t.dtype).removeprefix("torch."), tuple(t.shape[1:])) for n, t in tensors.items()}
