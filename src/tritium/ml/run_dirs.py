"""The run directory of each param map, below that of the estimator (driver)."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import threading
import weakref
from collections.abc import Mapping
from typing import Any

from tritium.checkpoint.code import Opener, code_of, describe
from tritium.errors import BadSetting
from tritium.file_system import Permissions
from tritium.model import files

PARAMS = "params.json"
_UNSAFE = re.compile(r"[^A-Za-z0-9_.,=+-]+")
_LONGEST = 80
_lock = threading.Lock()
_tables: dict[int, int] = {}
"""The id of a table that is alive → its number."""
_numbers = itertools.count(1 << 32)  # A semantic hash has 32 bits.


def below(run_dir: str, params: Mapping[str, Any], dataset: Any, fitted: dict[str, list[int]], opened: Opener) -> str:
    """Return the directory for a fit of this param map (name → value): `RUN_DIR/batch_size=16,epochs=5/1`.

    The number counts the datasets that this param map is fitted on: each fold of a CrossValidator, and the whole data
    at its end. It is the same in another session that makes the same calls, whatever their parallelism.

    fitted : name → the datasets so far, shared by the estimator and all its copies.
    opened : the framework's, which tells apart its objects among the values.
    """
    name = name_of_map(params, opened)
    key = dataset.semanticHash() if hasattr(dataset, "semanticHash") else _number_of(dataset)
    with _lock:
        known = fitted.setdefault(name, [])
        if key not in known:
            known.append(key)
        number = known.index(key) + 1
    return f"{run_dir.rstrip('/')}/{name}/{number}"


def _number_of(table: Any) -> int:
    """Return a number that is unique to this table in this process, unlike its `id`, which is reused."""
    known = id(table)
    with _lock:
        if known not in _tables:
            _tables[known] = next(_numbers)
            weakref.finalize(table, _tables.pop, known).atexit = False
        return _tables[known]


def name_of_map(params: Mapping[str, Any], opened: Opener) -> str:
    """Return a readable name for a param map's directory; maps with different values have different names."""
    texts = {name: _text(value, opened) for name, value in sorted(params.items())}
    whole = shown(params, opened)
    safe = _UNSAFE.sub("_", whole)[:_LONGEST]
    plain = all(isinstance(value, bool | int | float | str | None) for value in params.values())
    if plain and safe == whole:
        return safe
    exact = json.dumps({name: [text, list(code_of(params[name], opened)[:2])] for name, text in texts.items()})
    return f"{safe}-{hashlib.sha256(exact.encode()).hexdigest()[:8]}"


def shown(params: Mapping[str, Any], opened: Opener) -> str:
    """Return the param map as text: `batch_size=16,epochs=5`."""
    return ",".join(f"{name}={_text(value, opened)}" for name, value in sorted(params.items())) or "default"


def write_params(run_dir: str, params: Mapping[str, Any], opened: Opener) -> None:
    """Write the param map to `params.json` of its directory, with file and line of functions. Raises BadSetting."""
    texts = {name: _text(value, opened, place=True) for name, value in params.items()}
    try:
        store, root, local = files.opened(run_dir)
        opener = Permissions.within(root).opener if local else None
        store.makedirs(root, exist_ok=True)
        files.put(store, local, f"{root}/{PARAMS}", [json.dumps(texts, indent=1).encode()], opener)
    except OSError as error:
        raise BadSetting(f"run_dir={run_dir!r} can't be written: {error}", run_dir=run_dir) from error


def _text(value: Any, opened: Opener, *, place: bool = False) -> str:
    if isinstance(value, bool | int | float | str | None):
        return str(value)
    if isinstance(value, list | tuple):
        return "+".join(_text(item, opened, place=place) for item in value)
    code = getattr(value, "__code__", None)
    return describe(value, opened) + (f" of {code.co_filename}, line {code.co_firstlineno}" if place and code else "")
