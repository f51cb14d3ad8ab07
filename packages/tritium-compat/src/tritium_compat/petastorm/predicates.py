"""Predicates: which rows a reader returns (any process).

`make_reader` asks about one decoded row, a dict. `make_batch_reader` asks about a pandas DataFrame of many.
"""

from __future__ import annotations

import hashlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np


class PredicateBase(ABC):
    """What a predicate answers."""

    @abstractmethod
    def get_fields(self) -> Any:
        """Return the names of the fields that it needs."""

    @abstractmethod
    def do_include(self, values: Any) -> Any:
        """Return whether a row is wanted; of a DataFrame, one boolean a row."""


def _each(values: Any, includes: Callable[[Any], bool]) -> Any:
    """Ask about a row, or about each row of a DataFrame."""
    if not hasattr(values, "iterrows"):
        return includes(values)
    names = list(values.columns)
    rows = zip(*(values[name] for name in names), strict=True)
    return np.fromiter((includes(dict(zip(names, row, strict=True))) for row in rows), bool, len(values))


class in_set(PredicateBase):
    """Rows whose field has one of some values."""

    def __init__(self, inclusion_values: Iterable[Any], predicate_field: str) -> None:
        """Give the values and the field."""
        self._values, self._field = set(inclusion_values), predicate_field

    def get_fields(self) -> set[str]:
        """Return the field."""
        return {self._field}

    def do_include(self, values: Any) -> Any:
        """Return whether the value is one of them."""
        return _each(values, lambda row: row[self._field] in self._values)


class in_intersection(PredicateBase):
    """Rows whose field is a list with at least one of some values."""

    def __init__(self, inclusion_values: Iterable[Any], _predicate_field: str) -> None:
        """Give the values and the field."""
        self._values, self._field = list(inclusion_values), _predicate_field

    def get_fields(self) -> set[str]:
        """Return the field."""
        return {self._field}

    def do_include(self, values: Any) -> Any:
        """Return whether the list has one of them."""
        return _each(values, self._has)

    def _has(self, row: Any) -> bool:
        if not isinstance(row[self._field], Iterable):
            raise ValueError(f"in_intersection: the field {self._field!r} is not a list.")
        return bool(np.isin(row[self._field], self._values).any())


class in_lambda(PredicateBase):
    """Rows for which a function says so. `make_batch_reader` gives it columns (pandas Series), not values."""

    def __init__(self, predicate_fields: list[str], predicate_func: Callable[..., Any], state_arg: Any = None) -> None:
        """Give the fields, the function of their values in that order, and one more argument for it."""
        if not isinstance(predicate_fields, list):
            raise ValueError("in_lambda takes a list of fields.")
        self._fields, self._function, self._state = predicate_fields, predicate_func, state_arg

    def get_fields(self) -> set[str]:
        """Return the fields."""
        return set(self._fields)

    def do_include(self, values: Any) -> Any:
        """Call the function."""
        state = [] if self._state is None else [self._state]
        return self._function(*(values[field] for field in self._fields), *state)


class in_negate(PredicateBase):
    """Rows that another predicate leaves out."""

    def __init__(self, predicate: PredicateBase) -> None:
        """Give the other predicate."""
        _check(predicate)
        self._predicate = predicate

    def get_fields(self) -> Any:
        """Return the other's fields."""
        return self._predicate.get_fields()

    def do_include(self, values: Any) -> Any:
        """Return the opposite."""
        found = self._predicate.do_include(values)
        return ~np.asarray(found, bool) if hasattr(values, "iterrows") else not found


class in_reduce(PredicateBase):
    """Rows for which a function of several predicates' answers says so: `all`, `any`, or your own."""

    def __init__(self, predicate_list: Sequence[PredicateBase], reduce_func: Callable[[list[Any]], bool]) -> None:
        """Give the predicates, and the function of the list of their answers."""
        for predicate in predicate_list:
            _check(predicate)
        self._predicates, self._reduce = list(predicate_list), reduce_func

    def get_fields(self) -> set[str]:
        """Return the fields of all."""
        return {field for predicate in self._predicates for field in predicate.get_fields()}

    def do_include(self, values: Any) -> Any:
        """Ask all and reduce their answers."""
        answers = [predicate.do_include(values) for predicate in self._predicates]
        if not hasattr(values, "iterrows"):
            return self._reduce(answers)
        return np.fromiter((self._reduce(list(row)) for row in zip(*answers, strict=True)), bool, len(values))


class in_pseudorandom_split(PredicateBase):
    """Rows of one part of a split by the hash of a field: the same rows each time, and as Petastorm splits them."""

    def __init__(self, fraction_list: Sequence[float], subset_index: int, predicate_field: str) -> None:
        """Give the fractions of all parts, which part, and the field that is hashed."""
        if not 0 <= subset_index < len(fraction_list):
            raise ValueError(f"subset_index={subset_index} is none of the {len(fraction_list)} parts (from 0).")
        self._field = predicate_field
        self._low = sum(fraction_list[:subset_index]) * (sys.maxsize - 1)
        self._high = sum(fraction_list[: subset_index + 1]) * (sys.maxsize - 1)

    def get_fields(self) -> set[str]:
        """Return the field."""
        return {self._field}

    def do_include(self, values: Any) -> Any:
        """Return whether the hash falls into the part."""
        return _each(values, self._is_in)

    def _is_in(self, row: Any) -> bool:
        digest = hashlib.md5(str(row[self._field]).encode(), usedforsecurity=False).hexdigest()
        return self._low <= int(digest, 16) % sys.maxsize < self._high


def _check(predicate: Any) -> None:
    if not isinstance(predicate, PredicateBase):
        raise ValueError(f"{predicate!r} is not a predicate (PredicateBase).")
