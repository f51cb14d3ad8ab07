"""The signature of a model: columns, dtypes and shapes of its inputs and outputs (any process)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from tritium.data.schema import Content, Kind
from tritium.errors import MALFORMED, BadSetting, ModelError
from tritium.events import ModelDescribed
from tritium.model.forms import (
    ANYTHING,
    BOOL,
    NUMBER,
    TEXT,
    WHOLE,
    Requirement,
    either,
    having,
    list_of,
    mapping_of,
    one_of,
    optional,
    wrong,
)

if TYPE_CHECKING:
    from tritium.data.schema import Field

Task = Literal["regression", "classification"]
Activation = Literal["softmax", "sigmoid", "none"]


def _is_dtype(value: Any) -> bool:
    try:
        return isinstance(value, str) and (value in _BEYOND_NUMPY or np.dtype(value).kind in "fiub")
    except MALFORMED:
        return False


def _is_pad(value: Any) -> bool:
    return list_of(NUMBER).fits(value) and len(value) == 2 and WHOLE.fits(value[0])


_BEYOND_NUMPY = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
_DTYPE = Requirement("the name of a dtype", _is_dtype)
_SHAPE = list_of(Requirement("a length, or None", optional(WHOLE).fits))
_OUTPUT = {"name": TEXT, "dtype": _DTYPE, "shape": _SHAPE}
_INPUT = {**_OUTPUT, "columns": list_of(TEXT), "types": list_of(TEXT), "codec": mapping_of(ANYTHING)}
_SIGNATURE = {
    "activation": optional(one_of("softmax", "sigmoid", "none")),
    "label_words": mapping_of(list_of(TEXT)),
    "ranges": mapping_of(having(nulls=NUMBER, range=optional(list_of(NUMBER)))),
}
_CODEC = {
    **dict.fromkeys(("packed", "unknown", "asked"), optional(BOOL)),
    "kind": optional(one_of(*get_args(Kind))),
    "nan": optional(one_of("error", "keep")),
    "content": optional(one_of(*get_args(Content))),
    "depth": optional(WHOLE),
    "buckets": optional(WHOLE),
    "vocabulary": optional(list_of(TEXT)),
    "pad": optional(Requirement("a length and a number", _is_pad)),
    "nulls": optional(list_of(optional(either(NUMBER, TEXT)))),
    "mean": optional(list_of(NUMBER)),
    "std": optional(list_of(NUMBER)),
}


def _refuse(where: str, value: Mapping[str, Any], forms: Mapping[str, Requirement]) -> None:
    """Raise BadSetting where fields do not have these forms."""
    if problems := wrong(value, forms):
        raise BadSetting(f"{where}: {'; '.join(problems)}.")


@dataclass(frozen=True)
class Input:
    """One tensor that the module is called with.

    columns : the source columns: one column, or several scalars that together make one row of the tensor.
    shape   : a row's, without the batch: () for one number, (n,) for n columns, None for a length that varies.
    types   : the types of the columns at training, as `tritium.data.types` names them ("number", "date", "string", …).
    codec   : how the values became numbers (`tritium.data.schema.Field.to_json()`): vocabulary, buckets, padding.
    """

    name: str
    columns: tuple[str, ...]
    dtype: str = "float32"
    shape: tuple[int | None, ...] = ()
    types: tuple[str, ...] = ()
    codec: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _refuse(f"Input {self.name!r}", vars(self), _INPUT)
        _refuse(f"Input {self.name!r}: codec", self.codec, _CODEC)
        for name in ("columns", "shape", "types"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not self.columns:
            raise BadSetting(f"Input {self.name!r} has no source columns.")
        if self.types and len(self.types) != len(self.columns):
            raise BadSetting(f"Input {self.name!r} has {len(self.types)} types for {len(self.columns)} columns.")

    @classmethod
    def of(cls, planned: Field, schema: Any, shape: tuple[int | None, ...] | None = None) -> Input:
        """Return the input for a Field of a DataFrame's schema; `shape` is for a plan that left it to the first row."""
        from tritium.data.types import columns_of

        known = columns_of(schema)
        return cls(
            name=planned.name,
            columns=planned.sources,
            dtype=planned.dtype,
            shape=shape if shape is not None else planned.shape or (),
            types=tuple(known[source].leaf()[0].name for source in planned.sources),
            codec=planned.to_json(),
        )

    @property
    def names(self) -> list[str]:
        """The names of the numbers in a row, of which none has a length that varies."""
        return names_of_numbers(self.columns, math.prod(n or 0 for n in self.shape), self.codec.get("slots", ()))


@dataclass(frozen=True)
class Output:
    """One tensor that the module returns; `shape` is a row's, without the batch."""

    name: str
    dtype: str = "float32"
    shape: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        _refuse(f"Output {self.name!r}", vars(self), _OUTPUT)
        object.__setattr__(self, "shape", tuple(self.shape))

    @property
    def scalar(self) -> bool:
        """Whether it is one number a row: `[batch]` or `[batch, 1]`."""
        return self.shape in ((), (1,))


@dataclass(frozen=True)
class Signature:
    """The inputs and outputs of a model, and the task of its predictions.

    One input is passed to the module by position, several by keyword under their names. The module returns one
    tensor, or a tuple in the order of `outputs`, or a dict under their names.

    task        : "classification" takes the only output as scores of k classes (`[batch, k]`, or `[batch]` and
                  `[batch, 1]` for two).
    activation  : makes probabilities of the scores: "softmax" (the default for k > 1; right after `CrossEntropyLoss`
                  and `NLLLoss`), "sigmoid" (the default for one score; right after `BCEWithLogitsLoss`), or "none"
                  when the module returns probabilities.
    label_words : the words of each label column that held strings, at the index that the module was trained with:
                  `{"churn": ("no", "yes")}`.
    ranges      : source column → its share of nulls in the training's data ("nulls"), and of numbers the least and the
                  largest ("range"); empty where they are not known.
    """

    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    task: Task | None = None
    activation: Activation | None = None
    label_words: Mapping[str, Sequence[str]] = field(default_factory=dict)
    ranges: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", tuple(self.inputs))
        object.__setattr__(self, "outputs", tuple(self.outputs))
        _refuse("Signature", vars(self), _SIGNATURE)
        object.__setattr__(self, "label_words", {name: tuple(words) for name, words in self.label_words.items()})
        if not self.inputs or not self.outputs:
            raise BadSetting("A signature needs at least one input and one output.")
        for kind, names in (
            ("inputs", [i.name for i in self.inputs]),
            ("outputs", [o.name for o in self.outputs]),
        ):
            if len(set(names)) != len(names):
                raise BadSetting(f"A signature's {kind} need different names, and got {names}.")
        if self.task not in (None, "regression", "classification"):
            raise BadSetting(f"task={self.task!r} is neither 'regression' nor 'classification'.")
        if self.task == "classification":
            check_classes(self.outputs)
            if self.activation is None:
                chosen = "sigmoid" if self.outputs[0].scalar else "softmax"
                object.__setattr__(self, "activation", chosen)
            classes = 2 if self.outputs[0].scalar else self.outputs[0].shape[0]
            if classes is not None and len(self.class_words) > classes:
                raise BadSetting(
                    f"label_words has {len(self.class_words)} words, and the model gives scores of {classes} classes."
                )

    @property
    def columns(self) -> tuple[str, ...]:
        """Every source column, each once, in order."""
        return tuple(dict.fromkeys(c for i in self.inputs for c in i.columns))

    @property
    def class_words(self) -> tuple[str, ...]:
        """The words of a classification's classes, by their indices; () where the label was no column of strings."""
        return tuple(next(iter(self.label_words.values()), ())) if self.task == "classification" else ()

    @property
    def output_columns(self) -> tuple[str, ...]:
        """The columns that `transform` adds by default."""
        return ("prediction", "probability") if self.task == "classification" else ("prediction",)

    def described(self) -> ModelDescribed:
        """Return the event that tells the inputs and outputs to who watches a run."""
        inputs = [{"name": i.name, "columns": i.columns, "dtype": i.dtype, "shape": i.shape} for i in self.inputs]
        outputs = [{"name": o.name, "dtype": o.dtype, "shape": o.shape} for o in self.outputs]
        return ModelDescribed(inputs=inputs, outputs=outputs, ranges=self.ranges or None)

    def to_json(self) -> dict[str, Any]:
        """Return a plain dict, from which `from_json` restores the signature."""
        return dict(json.loads(json.dumps(asdict(self))))

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Signature:
        """Return the signature of `to_json`. Raises ModelError for anything else."""
        if not isinstance(value, Mapping):
            raise ModelError(f"The model's signature is damaged: it is {value!r:.100}.")
        known = {f.name for f in fields(cls)}
        rest = {k: v for k, v in value.items() if k in known and k not in ("inputs", "outputs")}
        try:
            return cls(
                inputs=tuple(Input(**i) for i in value["inputs"]),
                outputs=tuple(Output(**o) for o in value["outputs"]),
                **rest,
            )
        except (BadSetting, *MALFORMED) as error:
            raise ModelError(f"The model's signature is damaged: {error}") from error


def names_of_numbers(columns: Sequence[str], width: int, slots: Sequence[str] = ()) -> list[str]:
    """Return the names of the `width` numbers in a row: those of the columns, or `v_0`, `v_1`, … in one column `v`.

    slots : the names that the metadata of a vector column gives its numbers.
    """
    if len(slots) == width:
        return list(slots)
    return list(columns) if len(columns) == width else [f"{columns[0]}_{i}" for i in range(width)]


def check_classes(outputs: Sequence[Output]) -> None:
    """Raise BadSetting unless these outputs of a module in eval mode can be the scores of a classification."""
    if len(outputs) != 1:
        names = ", ".join(f"{output.name} {shown(output.shape)}" for output in outputs)
        raise BadSetting(
            f"Classification takes one output, and the module returns {len(outputs)} in eval mode: {names}. Let it "
            "return the scores alone there (module.training tells the modes), or take task=None, which predicts all of "
            "them as they are."
        )
    output = outputs[0]
    if len(output.shape) > 1:
        raise BadSetting(
            f"Classification takes an output of shape [batch, classes]; {output.name!r} has {shown(output.shape)}. "
            "task=None predicts it as it is."
        )


def shown(shape: Iterable[int | None]) -> str:
    """Return a row's shape as text with the batch: `[batch, 3]`."""
    return "[" + ", ".join(["batch", *("?" if n is None else str(n) for n in shape)]) + "]"
