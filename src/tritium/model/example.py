"""Infers a model's signature from a batch that it can be called with (any process)."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tritium.data.schema import Field
from tritium.errors import BadData, BadSetting
from tritium.hints import suggest
from tritium.model.engine import Engine
from tritium.model.signature import Activation, Input, Signature, Task

_PACKED = "features"
_TYPES = {"bytes": "binary", "string": "string", "integer": "number"}


def signature_of(
    engine: Engine,
    example: Any,
    inputs: Sequence[str] | str | None,
    task: Task | None,
    activation: Activation | None,
) -> Signature:
    """Return the signature of a model that can be called with the columns `inputs` of `example`.

    example : a batch of a shard, a mapping of arrays `[rows, …]`, or a pandas DataFrame or Arrow table, whose numeric
              columns are packed to one input.

    Raises BadSetting where it can't be told what the inputs are, and BadData where the model does not take them.
    """
    if example is None:
        raise BadSetting(
            "A model needs a signature: the columns that it takes, and what it returns. Give an example of what it is "
            "called with, tr.Model(module, example=batch), or a Signature.",
            setting="signature",
        )
    columns, known = _columns(example)
    names = _inputs(engine, list(columns), inputs)
    arrays = {name: columns[name] for name in names}
    try:
        outputs = engine.describe(arrays)
    except (BadData, BadSetting):
        raise
    except Exception as error:
        listed = "".join(f"\n  - {name} {list(array.shape)} {array.dtype}" for name, array in arrays.items())
        raise BadData(
            f"The model can't be called with the example: {type(error).__name__}: {error}\nIt was called with{listed}"
        ) from error
    return Signature(
        tuple(_input(name, array, known.get(name)) for name, array in arrays.items()),
        outputs,
        task=task,
        activation=activation,
    )


def _columns(example: Any) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, Any]]:
    """Return arrays by name, and where they come from: Fields of a shard, or lists of a table's columns."""
    if hasattr(example, "iloc") or hasattr(example, "column_names"):
        return _packed(example)
    if not isinstance(example, Mapping):
        raise BadSetting(
            f"example is a {type(example).__name__}, and must be a batch, a mapping of arrays by name, or a table.",
            setting="example",
        )
    fields = {field.name: field for field in getattr(example, "schema", ())}
    return {str(name): _array(value) for name, value in example.items()}, dict(fields)


def _packed(table: Any) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, Any]]:
    names = [str(name) for name in (table.columns if hasattr(table, "iloc") else table.column_names)]
    arrays = [np.asarray(table[name]) for name in names]
    wrong = [name for name, array in zip(names, arrays, strict=True) if array.dtype.kind not in "fiub"]
    if wrong or not names:
        raise BadSetting(
            f"example: {', '.join(map(repr, wrong)) or 'a table without columns'} can't be packed to numbers. Give the "
            "numeric columns alone, or a mapping of arrays by name.",
            setting="example",
        )
    return {_PACKED: np.stack(arrays, axis=1).astype(np.float32)}, {_PACKED: names}


def _array(value: Any) -> np.ndarray[Any, Any]:
    if hasattr(value, "detach"):  # a torch tensor, without importing torch
        value = value.detach().cpu().numpy()
    return np.asarray(value)


def _inputs(engine: Engine, there: list[str], asked: Sequence[str] | str | None) -> list[str]:
    """Return the columns that the module is called with. Raises BadSetting."""
    if asked is not None:
        names = [asked] if isinstance(asked, str) else list(asked)
        missing = [name for name in names if name not in there]
        if missing or not names:
            hint = suggest(missing[0], there) if missing else ""
            raise BadSetting(f"inputs={asked!r}: the example has no {', '.join(map(repr, missing))}.{hint}")
        return names
    if len(there) == 1:
        return there
    taken = _arguments(engine.module) if engine.transform is None else []  # a transform may give other ones
    if taken and all(name in there for name in taken):
        return taken
    listed = ", ".join(map(repr, there))
    raise BadSetting(
        f"The example has the columns {listed}, and the model's arguments are {', '.join(taken) or 'not known'}. Name "
        f"those that it is called with: inputs=[{there[0]!r}].",
        setting="inputs",
    )


def _arguments(module: Any) -> list[str]:
    """Return the arguments without a default of a module's `forward`; none where they are not known."""
    forward = getattr(module, "forward", None)
    if forward is None:
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(forward).parameters.values()
    return [p.name for p in parameters if p.kind in kinds and p.default is p.empty]


def _input(name: str, array: np.ndarray[Any, Any], source: Any) -> Input:
    """Return an input with the decoding of a shard's Field, or of plain columns."""
    shape, dtype = array.shape[1:], array.dtype.name
    if isinstance(source, Field):
        of_words = source.vocabulary is not None or source.buckets is not None
        kind = _TYPES[source.content] if source.kind == "bytes" else "string" if of_words else "number"
        types = (kind,) * len(source.sources) if kind != "number" else ()
        return Input(name, source.sources, dtype, shape, types, source.to_json())
    return Input(name, tuple(source) if source else (name,), dtype, shape)
