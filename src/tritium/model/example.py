"""Infers a model's signature from a batch that it can be called with (any process)."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from tritium.data.batch import Batch
from tritium.data.decode import Decode, content_of, content_of_values, decoded, raw_values
from tritium.data.schema import Content, Field
from tritium.data.shard import Shard, in_use
from tritium.data.tables import column_of, table_of
from tritium.data.types import columns_of
from tritium.errors import BadData, BadRow, BadSetting
from tritium.hints import suggest
from tritium.model.engine import Engine
from tritium.model.signature import Activation, Input, Signature, Task, shown

_PACKED = "features"
_TYPES = {"bytes": ("binary",), "string": ("string",), "integer": ("number",), "image": ("image",), None: ()}
_EXAMPLE_ROWS = 32

Decoders = Mapping[str, Decode]


@dataclass(frozen=True)
class _Column:
    """A column of an example, before it is known whether the model takes it."""

    values: Any
    field: Field | None = None
    """How a shard has made it of source columns."""
    sources: tuple[str, ...] = ()
    """The columns of a table that it comes from; () with a field, and where it is only known by its name."""
    decode: Decode | None = None
    """The function or dataset that decoded it."""
    problem: str = ""
    """Why the model can't take it."""


def signature_of(
    engine: Engine,
    example: Any,
    inputs: Sequence[str] | str | None,
    task: Task | None,
    activation: Activation | None,
    decode: Decoders,
    label_words: Mapping[str, Sequence[str]] | str | None = None,
) -> tuple[Signature, dict[str, Decode]]:
    """Return the signature of a model that can be called with the columns `inputs` of `example`, and its decoders.

    example : a shard, a batch of one, a mapping of arrays `[rows, …]`, or a pandas DataFrame or Arrow table, whose
              numeric columns are packed to one input. In a rank, an array of a mapping is taken to be the column of
              a shard that has its name.
    decode  : column → the function that makes arrays of its values; a shard's own functions are added.
    label_words : label column → its words, or the column of the example whose vocabulary they are.

    Raises BadSetting where the inputs are not clear, or could not be had at prediction; BadData where the model does
    not take them.
    """
    if example is None and (declared := engine.declared()) is not None:
        if isinstance(label_words, str) or decode:
            what = "decode" if decode else "label_words"
            raise BadSetting(f"{what} is about the columns of an example: give one, example=….", setting=what)
        words = label_words or declared.label_words
        return dataclasses.replace(declared, task=task, activation=activation, label_words=words), {}
    if example is None:
        raise BadSetting(
            "A model needs a signature: the columns that it takes, and what it returns. Give an example of what it is "
            "called with, tr.Model(module, example=batch), or a Signature.",
            setting="signature",
        )
    columns = _columns(example, decode)
    if unknown := [name for name in decode if name not in columns]:
        raise BadSetting(
            f"decode names {unknown[0]!r}, which the example does not have.{suggest(unknown[0], columns)}",
            setting="decode",
        )
    names = _inputs(engine, columns, inputs)
    if wrong := [columns[name].problem for name in names if columns[name].problem]:
        raise BadSetting(f"example: {' '.join(wrong)}", setting="example")
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    taken: list[Input] = []
    functions: dict[str, Decode] = {}
    for name in names:
        column, function = columns[name], decode.get(name, columns[name].decode)
        arrays[name], content = _array(name, column, function)
        taken.append(_input(name, arrays[name], column, function, content))
        functions |= {} if function is None else {name: function}
    try:
        outputs = engine.describe(arrays)
    except (BadData, BadSetting):
        raise
    except Exception as error:
        listed = "".join(f"\n  - {name} {list(array.shape)} {array.dtype}" for name, array in arrays.items())
        raise BadData(
            f"The model can't be called with the example: {type(error).__name__}: {error}\nIt was called with{listed}"
        ) from error
    words = _vocabulary(columns, label_words) if isinstance(label_words, str) else label_words or {}
    return Signature(tuple(taken), outputs, task=task, activation=activation, label_words=words), functions


def _columns(example: Any, decode: Decoders) -> dict[str, _Column]:
    if isinstance(example, Shard):
        example = example.peek(_EXAMPLE_ROWS)
    if isinstance(example, Batch):
        known = {field.name: field for field in example.schema}
        return {
            name: _Column(value, known.get(name), decode=_function(example.decode, name), problem=_mask(name, known))
            for name, value in example.items()
        }
    if isinstance(example, pa.Table | pa.RecordBatch) or hasattr(example, "iloc"):
        return _of_table(table_of(example, "example").slice(0, _EXAMPLE_ROWS), decode)
    if not isinstance(example, Mapping):
        raise BadSetting(
            f"example is a {type(example).__name__}, and must be a shard, a batch, a mapping of arrays by name, or a "
            "table.",
            setting="example",
        )
    return {str(name): _named(str(name), value) for name, value in example.items()}


def _vocabulary(columns: Mapping[str, _Column], name: str) -> dict[str, Sequence[str]]:
    """Return the words of a column of a shard by the name of its source. Raises BadSetting where it has none."""
    field = columns[name].field if name in columns else None
    if field is None or field.vocabulary is None:
        known = [other for other, column in columns.items() if column.field is not None and column.field.vocabulary]
        raise BadSetting(
            f"label_words={name!r} is no column of the example that has a vocabulary.{suggest(name, known)} Or give "
            f"the words: label_words={{{name!r}: [...]}}.",
            setting="label_words",
        )
    return {field.sources[0]: field.vocabulary}


def _function(decoders: Mapping[str, Any], name: str) -> Decode | None:
    return decoders[name].users if name in decoders else None


def _mask(name: str, fields: Mapping[str, Field]) -> str:
    """Return why predictions can't have this column, where it is a mask of nulls; else ""."""
    of = fields.get(name.removesuffix("_mask"))
    if name in fields or of is None or not of.mask:
        return ""
    return (
        f"{name!r} marks the nulls of {of.name!r}, and predictions have no such mark. Let the module take "
        f"{of.name!r} alone, with a value for nulls: tr.Data(…, nulls={{{of.name!r}: 0}})."
    )


def _named(name: str, value: Any) -> _Column:
    """Return a column of a mapping, with the Field of a shard's column of that name, if a shard of this rank has it."""
    shards = [shard for shard in in_use if any(name in (f.name, f"{f.name}_mask") for f in shard.schema)]
    if not shards:
        return _Column(value)
    fields = [{field.name: field for field in shard.schema} for shard in shards]
    if problem := next(filter(None, (_mask(name, known) for known in fields)), ""):
        return _Column(value, problem=problem)
    fields_of_name = {known[name] for known in fields if name in known}
    if len(fields_of_name) > 1:
        listed = ", ".join(sorted(repr(shard.name) for shard in shards))
        return _Column(
            value, problem=f"the shards {listed} have different columns {name!r}. Give one of them: example=shard."
        )
    if not fields_of_name:
        return _Column(value)
    functions = [function for shard in shards if (function := _function(shard.decode, name)) is not None]
    return _Column(value, fields_of_name.pop(), decode=functions[0] if functions else None)


def _of_table(table: pa.Table, decode: Decoders) -> dict[str, _Column]:
    """Return the columns of a table: numbers packed to one, arrays and decoded columns each on its own."""
    columns: dict[str, _Column] = {}
    numbers = []
    known = columns_of(table.schema)
    for name in table.schema.names:
        leaf, depth = known[name].leaf()
        if name in decode:
            columns[name] = _Column(column_of(table, name).to_pylist(), sources=(name,))
        elif known[name].name == "number":
            numbers.append(name)
        elif leaf.name == "number" and depth:
            columns[name] = _Column(column_of(table, name).to_pylist(), sources=(name,))
        else:
            advice = f", decode={{{name!r}: function}}" if content_of(known[name]) is not None else ""
            columns[name] = _Column(
                None,
                sources=(name,),
                problem=f"{name!r} can't be packed to numbers. Give the numeric columns alone, or a mapping of arrays "
                f"by name{', or what makes an array of each value' if advice else ''}{advice}.",
            )
    if not table.schema.names:
        raise BadSetting("example: a table without columns.", setting="example")
    if not numbers:
        return columns
    if _PACKED in columns:
        raise BadSetting(
            f"example: the numbers of {', '.join(map(repr, numbers))} would be packed to an input {_PACKED!r}, as "
            "another column is called. Give the columns that the model takes alone, or a mapping of arrays by name.",
            setting="example",
        )
    rows = [column_of(table, name).to_numpy(zero_copy_only=False) for name in numbers]
    return {_PACKED: _Column(np.stack(rows, axis=1).astype(np.float32), sources=tuple(numbers)), **columns}


def _array(name: str, column: _Column, function: Decode | None) -> tuple[np.ndarray[Any, Any], Content | None]:
    """Return an input's first rows, and the content of the values decoded for them; None where none were decoded."""
    values = column.values
    raw = None if function is None else raw_values(values)
    if raw is not None:

        def bad(row: int, what: str, value: Any) -> BadRow:
            return BadRow(
                f"the example's {name!r}, row {row}, {what}", column=name, row_id=row, value=value, batch_column=name
            )

        return decoded(function, raw[:_EXAMPLE_ROWS], bad), content_of_values(raw)
    try:
        if hasattr(values, "detach"):  # By its method: to ask for the class would import torch.
            values = values.detach().cpu().numpy()
        array = np.asarray(values)[:_EXAMPLE_ROWS]
    except Exception as error:
        raise BadSetting(
            f"The example's {name!r} is no array of numbers: {type(error).__name__}: {error}. In a rank, take the "
            "shard as the example: tr.Model(module, example=shard).",
            setting="example",
        ) from error
    if array.dtype.kind not in "fiubV":
        what = f"holds values of type {type(array.flat[0]).__name__}" if array.size else f"is an array of {array.dtype}"
        raise BadSetting(
            f"The example's {name!r} {what}, which no model takes. Say what makes an array of each: "
            f"tr.Model(…, decode={{{name!r}: function}}).",
            setting="decode",
        )
    if column.sources and array.dtype.kind == "f":
        array = array.astype(np.float32)  # An estimator reads a table's numbers as float32, too.
    return array, None


def _inputs(engine: Engine, columns: Mapping[str, _Column], asked: Sequence[str] | str | None) -> list[str]:
    """Return the columns that the module is called with. Raises BadSetting."""
    names_in_example = list(columns)
    if asked is not None:
        names = [asked] if isinstance(asked, str) else list(asked)
        missing = [name for name in names if name not in names_in_example]
        if missing or not names:
            hint = suggest(missing[0], names_in_example) if missing else ""
            raise BadSetting(f"inputs={asked!r}: the example has no {', '.join(map(repr, missing))}.{hint}")
        return names
    if len(names_in_example) == 1:
        return names_in_example
    taken = _arguments(engine.module) if engine.transform is None else []  # A transform may rename them.
    if taken and all(name in names_in_example for name in taken):
        return taken
    if wrong := [column.problem for column in columns.values() if column.problem and column.sources]:
        raise BadSetting(f"example: {' '.join(wrong)}", setting="example")
    listed = ", ".join(map(repr, names_in_example))
    raise BadSetting(
        f"The example has the columns {listed}, and the model's arguments are {', '.join(taken) or 'not known'}. Name "
        f"those that it is called with: inputs=[{names_in_example[0]!r}].",
        setting="inputs",
    )


def _arguments(module: Any) -> list[str]:
    """Return the arguments without a default of a module's `forward`; none where they are not known."""
    forward = getattr(module, "forward", None)
    if forward is None:
        return []
    # TorchScript has a schema in place of a Python signature.
    if (schema := getattr(forward, "schema", None)) is not None:
        return [argument.name for argument in schema.arguments[1:] if not argument.has_default_value()]
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(forward).parameters.values()
    return [p.name for p in parameters if p.kind in kinds and p.default is p.empty]


def _input(
    name: str, array: np.ndarray[Any, Any], column: _Column, function: Decode | None, content: Content | None
) -> Input:
    """Return an input with the decoding of a shard's Field, of a function, or of plain columns."""
    shape, dtype = array.shape[1:], array.dtype.name
    field = column.field
    if field is not None and field.kind == "bytes":
        if function is None and field.content != "image":
            raise BadSetting(
                f"The example's {name!r} comes from column {field.sources[0]!r}, of bytes that the training has "
                f"decoded itself. Say how, for predictions: tr.Model(…, decode={{{name!r}: function}}).",
                setting="decode",
            )
        return Input(name, field.sources, dtype, shape, _TYPES[field.content], field.to_json())
    if function is not None:
        codec = Field(name=name, sources=(name,), kind="bytes", dtype="uint8", shape=None, nan="keep").to_json()
        return Input(name, (name,), dtype, shape, _TYPES[content], {**codec, "content": content})
    if field is None:
        return Input(name, column.sources or (name,), dtype, shape)
    of_words = field.vocabulary is not None or field.buckets is not None
    if shape == (1,) and field.shape == () and not of_words:  # The training reshaped it to [rows, 1].
        field = dataclasses.replace(field, packed=True, depth=1, shape=(1,))
    elif len(shape) != field.depth or (field.shape is not None and shape != field.shape):
        was = "[" + ", ".join(["batch", *(["?"] * field.depth if field.shape is None else map(str, field.shape))]) + "]"
        raise BadSetting(
            f"The example's {name!r} is {shown(shape)}, and column {name!r} of the shard {was}. Give it as it comes "
            f"from the shard (example=shard), and say what changes it: tr.Model(…, transform=function).",
            setting="example",
        )
    return Input(
        name, field.sources, dtype, shape, ("string",) * len(field.sources) if of_words else (), field.to_json()
    )
