"""Modules and optimizers on their way between processes, and a module as a Tritium model (driver, rank)."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tritium import Model
from tritium.integration import pickle_by_value
from tritium_compat.horovod.spark.common.predict import output_name


def packed(value: Any) -> bytes:
    """Return a module, optimizer or state as bytes."""
    if isinstance(value, torch.jit.ScriptModule):
        file = io.BytesIO()
        torch.jit.save(value, file)
        return b"script" + file.getvalue()
    return b"pickle" + pickle_by_value(value)


def unpacked(content: bytes) -> Any:
    """Return what was packed."""
    import pickle

    kind, rest = content[:6], content[6:]
    load: Any = torch.jit.load
    return load(io.BytesIO(rest)) if kind == b"script" else pickle.loads(rest)


def saved(state: Any) -> bytes:
    """Return a state as torch saves it."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def loaded(content: bytes) -> Any:
    """Return a state that torch has saved, on the CPU."""
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=False)


def plan_of(optimizer: Any, module: torch.nn.Module) -> tuple[Any, list[list[str]] | None, Any]:
    """Return class, names of the parameters of each group, and state of an optimizer, for `optimizer_for`."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    groups = [[names.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]
    known = all(name for group in groups for name in group)
    return type(optimizer), groups if known else None, optimizer.state_dict()


def optimizer_for(module: torch.nn.Module, kind: Any, groups: list[list[str]] | None, state: Any) -> Any:
    """Return an optimizer of this class with this state, bound to the module's parameters."""
    parameters = dict(module.named_parameters())
    bound: Any = module.parameters() if groups is None else [{"params": [parameters[n] for n in g]} for g in groups]
    made = kind(bound, lr=1)  # replaced by that of the state
    made.load_state_dict(state)
    return made


def rescaled(state: Any, factor: float) -> Any:
    """Return the state of an optimizer with its learning rates times a factor."""
    groups = [{**group, "lr": group["lr"] * factor} for group in state["param_groups"]]
    return {**state, "param_groups": groups}


class Positional(torch.nn.Module):
    """Calls a module as `horovod.spark` does: a float tensor for each feature column, in their order, reshaped."""

    def __init__(self, module: Any, names: Sequence[str], shapes: Sequence[Sequence[int]] | None, outputs: int) -> None:
        super().__init__()
        self.module, self.names, self.shapes, self.outputs = module, list(names), shapes, outputs

    def forward(self, *one: torch.Tensor, **several: torch.Tensor) -> Any:
        """Return the outputs flat: `[rows]` for one number a row, else `[rows, n]`."""
        given = [several[name] for name in self.names] if several else list(one)
        results = self.module(*shaped(given, self.shapes))
        listed = list(results) if isinstance(results, list | tuple) else [results]
        rows = given[0].shape[0]
        flat = [result.reshape(rows, -1) for result in listed[: self.outputs]]
        plain = [result[:, 0] if result.shape[1] == 1 else result for result in flat]
        return plain[0] if len(plain) == 1 else {output_name(n): result for n, result in enumerate(plain)}


def shaped(inputs: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]] | None) -> list[torch.Tensor]:
    """Return the inputs as floats in the shapes of `input_shapes`."""
    floats = [tensor.float() for tensor in inputs]
    if shapes is None:
        return floats
    return [tensor.reshape(*shape) for tensor, shape in zip(floats, shapes, strict=True)]


def model_of(module: Any, names: Sequence[str], sizes: Mapping[str, int | None], shapes: Any, outputs: int) -> Model:
    """Return a module as a model of Tritium's. `sizes`: numbers in a row of a feature column; None for a scalar."""
    module = module.eval()
    whole = Positional(module, names, shapes, outputs)
    rows = {name: (2,) if (size := sizes[name]) is None else (2, size) for name in names}
    zeros = {name: np.zeros(shape, np.float32) for name, shape in rows.items()}
    return Model(whole.eval(), example=zeros, inputs=list(names))
