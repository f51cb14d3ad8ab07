"""`TransformSpec`: a function of rows, and what it does to their schema (any process)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tritium_compat.petastorm.unischema import Unischema, UnischemaField

Edit = tuple[str, Any, tuple[int | None, ...], bool]  # name, type, shape, whether it may be None


def edit_field(name: str, numpy_dtype: Any, shape: tuple[int | None, ...], nullable: bool = False) -> Edit:
    """Return what `TransformSpec(edit_fields=…)` takes for a field that the function adds or changes."""
    return name, numpy_dtype, shape, nullable


class TransformSpec:
    """A function that is called while rows are read, and the fields that rows have after it."""

    def __init__(
        self,
        func: Callable[[Any], Any] | None = None,
        edit_fields: Sequence[Edit | UnischemaField] | None = None,
        removed_fields: Sequence[str] | None = None,
        selected_fields: Sequence[str] | None = None,
    ) -> None:
        """Describe it.

        func : of a row as a dict for `make_reader`, of a pandas DataFrame for `make_batch_reader`; returns the same
            kind.
        edit_fields : the fields that it adds or changes, see `edit_field`.
        removed_fields, selected_fields : what is left out, or what alone is kept, in that order. Only one of the two.
        """
        if removed_fields is not None and selected_fields is not None:
            raise ValueError("TransformSpec takes either removed_fields or selected_fields, not both.")
        self.func = func
        self.edit_fields = list(edit_fields or [])
        self.removed_fields = list(removed_fields or [])
        self.selected_fields = selected_fields


def transform_schema(schema: Unischema, transform_spec: TransformSpec) -> Unischema:
    """Return the schema that rows have after the transformation."""
    removed = set(transform_spec.removed_fields)
    _warn("removed_fields", removed - set(schema.fields))
    # A plain tuple has no place for a codec: (name, type, shape, nullable).
    edited = [UnischemaField(edit[0], edit[1], edit[2], None, edit[-1]) for edit in transform_spec.edit_fields]
    left_out = removed | {field.name for field in edited}
    fields = [field for name, field in schema.fields.items() if name not in left_out] + edited
    if transform_spec.selected_fields is not None:
        by_name = {field.name: field for field in fields}
        _warn("selected_fields", set(transform_spec.selected_fields) - set(by_name))
        fields = [by_name[name] for name in transform_spec.selected_fields if name in by_name]
    return Unischema(f"{schema._name}_transformed", fields)


def _warn(setting: str, unknown: Iterable[str]) -> None:
    names = ", ".join(sorted(unknown))
    if names:
        warnings.warn(f"TransformSpec({setting}=…): the schema has no field {names}; ignored.", stacklevel=5)
