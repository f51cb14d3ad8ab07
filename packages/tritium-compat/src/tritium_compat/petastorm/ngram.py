"""`NGram`: rows that follow one another in time, read together (any process)."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from tritium_compat.petastorm.unischema import Unischema, UnischemaField, match_unischema_fields


class NGram:
    """Several successive rows as one: a dict of time step -> row, with the fields that each step is to have.

    Rows of different row groups are never together.
    """

    def __init__(
        self,
        fields: Mapping[int, Sequence[UnischemaField | str]],
        delta_threshold: float,
        timestamp_field: UnischemaField | str,
        timestamp_overlap: bool = True,
    ) -> None:
        """Describe it.

        fields : time step -> its fields, or regular expressions of their names. Steps between that are not named are
            there, without fields.
        delta_threshold : the largest difference of time between a row and the next one.
        timestamp_field : the field of the time. Rows must be sorted by it within a row group.
        timestamp_overlap : False: no row is in two.
        """
        if not isinstance(fields, Mapping) or not all(isinstance(each, (list, tuple)) for each in fields.values()):
            raise ValueError("NGram(fields=…): a dict of time step -> a list of fields.")
        if isinstance(delta_threshold, bool) or not isinstance(delta_threshold, numbers.Number):
            raise ValueError(f"NGram(delta_threshold={delta_threshold!r}): it must be a number.")
        if not isinstance(timestamp_field, (UnischemaField, str)):
            raise ValueError("NGram(timestamp_field=…): a UnischemaField, or a regular expression of one's name.")
        if not isinstance(timestamp_overlap, bool):
            raise ValueError(f"NGram(timestamp_overlap={timestamp_overlap!r}): it must be True or False.")
        self._fields: dict[int, list[Any]] = {step: list(each) for step, each in fields.items()}
        self._time: Any = timestamp_field
        self.delta_threshold, self.timestamp_overlap = delta_threshold, timestamp_overlap

    @property
    def fields(self) -> dict[int, list[Any]]:
        """The fields by time step."""
        return self._fields

    @property
    def length(self) -> int:
        """How many rows are together."""
        return max(self._fields) - min(self._fields) + 1

    def resolve_regex_field_names(self, schema: Unischema) -> None:
        """Put fields in the place of regular expressions."""
        self._fields = {step: _fields(schema, each) for step, each in self._fields.items()}
        times = _fields(schema, [self._time])
        if len(times) != 1:
            raise ValueError(f"NGram(timestamp_field={self._time!r}): {len(times)} fields match it; there must be one.")
        self._time = times[0]

    def stored_fields(self) -> list[UnischemaField]:
        """Return every field that must be read."""
        return list(dict.fromkeys([*(field for each in self._fields.values() for field in each), self._time]))

    def get_field_names_at_timestep(self, timestep: int) -> list[str]:
        """Return the names of a step's fields."""
        return [field.name for field in self._fields.get(timestep, ())]

    def get_field_names_at_all_timesteps(self) -> list[Any]:
        """Return the fields of any step."""
        return list(dict.fromkeys(field for each in self._fields.values() for field in each))

    def get_schema_at_timestep(self, schema: Unischema, timestep: int) -> Unischema:
        """Return the schema of a step's row."""
        names = set(self.get_field_names_at_timestep(timestep))
        return schema.create_schema_view([field for name, field in schema.fields.items() if name in names])

    def form_ngram(self, data: Sequence[Mapping[str, Any]], schema: Unischema) -> list[dict[int, dict[str, Any]]]:
        """Return what successive rows make, each a dict of time step -> fields."""
        name, first = self._time.name, min(self._fields)
        times = [row[name] for row in data]
        names = {first + place: set(self.get_field_names_at_timestep(first + place)) for place in range(self.length)}
        found: list[dict[int, dict[str, Any]]] = []
        ended: Any = None
        for start in range(len(data) - self.length + 1):
            window = times[start : start + self.length]
            if any(later < earlier for earlier, later in pairwise(window)):
                raise NotImplementedError(f"NGram: the rows of a row group must be sorted by the field {name!r}.")
            if not self.timestamp_overlap and ended is not None and window[0] <= ended:
                continue
            if any(later - earlier > self.delta_threshold for earlier, later in pairwise(window)):
                continue
            rows = data[start : start + self.length]
            found.append(
                {
                    step: {key: value for key, value in row.items() if key in names[step]}
                    for step, row in zip(names, rows, strict=True)
                }
            )
            ended = window[-1]
        return found

    def make_namedtuple(self, schema: Unischema, ngram_as_dicts: Mapping[int, Mapping[str, Any]]) -> dict[int, Any]:
        """Return the rows of an n-gram as named tuples."""
        return {
            step: self.get_schema_at_timestep(schema, step).make_namedtuple(**row)
            for step, row in ngram_as_dicts.items()
        }

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, NGram) or set(self._fields) != set(other._fields):
            return False
        return all(set(each) == set(other._fields[step]) for step, each in self._fields.items())

    __hash__ = None  # type: ignore[assignment]


def _fields(schema: Unischema, given: Sequence[Any]) -> list[UnischemaField]:
    fields = [field for field in given if isinstance(field, tuple)]
    patterns = [field for field in given if isinstance(field, str)]
    if len(fields) + len(patterns) != len(given):
        raise ValueError("A field of an NGram is a UnischemaField, or a regular expression of names.")
    return [UnischemaField(*field) for field in fields] + match_unischema_fields(schema, patterns)
