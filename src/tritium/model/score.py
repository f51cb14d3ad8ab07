"""Apply a module to batches of arrays: one way for Spark and for a plain process (any process)."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from tritium.errors import BadSetting, ModelError
from tritium.model.signature import Output, Signature, shown

if TYPE_CHECKING:
    import torch


@contextmanager
def evaluating(module: torch.nn.Module) -> Iterator[None]:
    """In eval mode inside; after it, every layer is as it was.

    Several threads may be inside with modules that share layers: the last one to leave puts a layer's mode back, as
    the others still compute with it.
    """
    layers = list(module.modules())
    with _lock:
        for layer in layers:
            users, training = _evaluated.get(id(layer), (0, layer.training))
            _evaluated[id(layer)] = (users + 1, training)
    try:
        module.eval()
        yield
    finally:
        with _lock:
            for layer in layers:
                users, training = _evaluated.pop(id(layer))
                if users > 1:
                    _evaluated[id(layer)] = (users - 1, training)
                else:
                    layer.training = training


_lock = threading.Lock()
_evaluated: dict[int, tuple[int, bool]] = {}  # by id of a layer that is in use: its users, and its mode before them


def score(
    module: torch.nn.Module,
    signature: Signature,
    inputs: Mapping[str, np.ndarray],
    *,
    batch_size: int,
    device: str | torch.device,
) -> dict[str, np.ndarray]:
    """Every output column for these rows, computed in batches of at most `batch_size`; `module` is in eval
    mode.

    `inputs` are `[rows, *shape]` by name. One scalar gives float64 `[rows]`; classification gives
    `prediction` (the class index as float64 `[rows]`) and `probability` (float64 `[rows, classes]`); others
    `[rows, *shape]` in their dtype. For no rows the module is not called, as many can't take them; a length that varies
    is 0 then.
    """
    import torch

    rows = len(next(iter(inputs.values())))
    if rows == 0:
        return _empty(signature)
    parts: list[dict[str, np.ndarray]] = []
    with torch.inference_mode():
        for start in range(0, rows, batch_size):
            batch = {n: torch.tensor(a[start : start + batch_size], device=device) for n, a in inputs.items()}
            parts.append(_columns(signature, call(module, signature, batch), min(batch_size, rows - start)))
    return parts[0] if len(parts) == 1 else {n: np.concatenate([p[n] for p in parts]) for n in parts[0]}


def call(module: torch.nn.Module, signature: Signature, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The module's outputs by name: one input as it is, several by keyword."""
    import torch

    if len(signature.inputs) == 1:
        result: Any = module(batch[signature.inputs[0].name])
    else:
        result = module(**{i.name: batch[i.name] for i in signature.inputs})
    names = [o.name for o in signature.outputs]
    if isinstance(result, torch.Tensor):
        result = (result,)
    found = dict(result) if isinstance(result, Mapping) else dict(zip(names, result, strict=False))
    missing = [n for n in names if not isinstance(found.get(n), torch.Tensor)]
    if missing or (not isinstance(result, Mapping) and len(result) != len(names)):
        given = sorted(map(str, result)) if isinstance(result, Mapping) else f"{len(result)} value(s)"
        raise ModelError(f"The module should return the tensors {names}, and returned {given}.")
    return {n: found[n] for n in names}


def _columns(signature: Signature, outputs: Mapping[str, torch.Tensor], rows: int) -> dict[str, np.ndarray]:
    for output in signature.outputs:
        _check(output, outputs[output.name], rows)
    if signature.task == "classification":
        return _classes(signature, outputs[signature.outputs[0].name])
    return {n: _array(o, outputs[o.name]) for n, o in _named(signature)}


def _named(signature: Signature) -> list[tuple[str, Output]]:
    """The outputs, under the names that their predictions have."""
    if len(signature.outputs) == 1:
        return [("prediction", signature.outputs[0])]
    return [(o.name, o) for o in signature.outputs]


def _empty(signature: Signature) -> dict[str, np.ndarray]:
    """The predictions for no rows, as the signature says them."""
    if signature.task == "classification":
        output = signature.outputs[0]
        classes = 2 if output.scalar else output.shape[0] or 0
        return {"prediction": np.empty(0), "probability": np.empty((0, classes))}
    return {
        n: np.empty(0) if o.scalar else np.empty((0, *(w or 0 for w in o.shape)), _dtype(o))
        for n, o in _named(signature)
    }


def _dtype(output: Output) -> str:
    """What `_array` gives for it; NumPy has no bfloat16."""
    return "float32" if output.dtype in ("bfloat16", "float16") else output.dtype


def _check(output: Output, tensor: torch.Tensor, rows: int) -> None:
    shape = tuple(tensor.shape[1:])
    same = len(shape) == len(output.shape) and all(w in (None, n) for w, n in zip(output.shape, shape, strict=True))
    if tensor.ndim == 0 or tensor.shape[0] != rows or not (same or (output.scalar and shape in ((), (1,)))):
        raise ModelError(
            f"Output {output.name!r} should be {shown(output.shape)} with a batch of {rows}, and the module returned "
            f"{list(tensor.shape)}."
        )


def _array(output: Output, tensor: torch.Tensor) -> np.ndarray:
    import torch

    tensor = tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
    array: np.ndarray = tensor.cpu().numpy()
    return array.reshape(-1).astype(np.float64) if output.scalar else array


def _classes(signature: Signature, scores: torch.Tensor) -> dict[str, np.ndarray]:
    import torch

    scores = scores.double().cpu()
    single = signature.outputs[0].scalar
    if single:
        chance = scores.reshape(-1, 1)
        chance = chance.sigmoid() if signature.activation == "sigmoid" else chance
        probability = torch.cat([1 - chance, chance], dim=1)
    elif signature.activation == "softmax":
        probability = scores.softmax(dim=1)
    else:
        probability = scores.sigmoid() if signature.activation == "sigmoid" else scores
    return {
        "prediction": probability.argmax(dim=1).double().numpy(),
        "probability": probability.numpy(),
    }


def pick_device(device: str | None, module: torch.nn.Module) -> torch.device:
    """The device asked for, or where the module is. A GPU that is not there is an error, never the CPU
    instead."""
    import torch

    if device is None:
        weight = next(itertools.chain(module.parameters(), module.buffers()), None)
        return torch.device("cpu") if weight is None else weight.device
    wanted = check_device(device)
    if wanted.type == "cuda" and (wanted.index or 0) >= torch.cuda.device_count():
        raise BadSetting(f"device={device!r}: torch sees {torch.cuda.device_count()} GPU(s) here. Use device='cpu'.")
    return wanted


def check_device(device: str) -> torch.device:
    """The torch device of this name, which need not be on this machine; BadSetting when there is none."""
    import torch

    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise BadSetting(f"device={device!r} is no torch device: {error}") from error
