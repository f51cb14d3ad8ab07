"""Which type of numpy a column of Arrow has in Petastorm (any process)."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa

_BY_TEST = (
    (pa.types.is_boolean, np.bool_),
    (pa.types.is_string, np.str_),
    (pa.types.is_large_string, np.str_),
    (pa.types.is_binary, np.bytes_),
    (pa.types.is_large_binary, np.bytes_),
    (pa.types.is_fixed_size_binary, np.bytes_),
    (pa.types.is_decimal, Decimal),
    (pa.types.is_date, np.datetime64),
    (pa.types.is_timestamp, np.datetime64),
)


def is_list(arrow_type: Any) -> bool:
    """Return whether it is one of Arrow's types of lists."""
    tests = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(test(arrow_type) for test in tests)


def numpy_type(arrow_type: Any) -> Any:
    """Return numpy's type (or Decimal) of a column's values; ValueError where Petastorm has none."""
    if pa.types.is_dictionary(arrow_type):
        return numpy_type(arrow_type.value_type)
    if pa.types.is_integer(arrow_type) or pa.types.is_floating(arrow_type):
        return np.dtype(arrow_type.to_pandas_dtype()).type
    for test, found in _BY_TEST:
        if test(arrow_type):
            return found
    if is_list(arrow_type) and not is_list(arrow_type.value_type):
        return numpy_type(arrow_type.value_type)
    raise ValueError(f"A column of {arrow_type} can't be read: only scalars, and lists of them.")
