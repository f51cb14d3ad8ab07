"""Damages: bytes that are flipped, cut, added, doubled or exchanged, and JSON with other values than were written."""

from __future__ import annotations

import contextlib
import copy
import json
import random
import sys
from collections.abc import Iterator
from typing import Any

CANARY = "fuzz.damages:canary"
STRANGE: list[Any] = [
    *(None, True, 0, -1, 3, 1.5, 10**12, 2**63, 10**30, float("inf"), float("nan")),
    *("", "x", "\ud800", "../x", "O", "S0", "1,2", "float32", "int64", "F64", "I32", "qint8", CANARY),
    *([], [1], ["x"], [None], [[]], [10**9], [0, 10**12], [0, 2**62, 8]),
    *({}, {"a": 1}, {"a": {}}, {"tuple": []}, {"dict": {}}),
]
_DEEP = "deep within"


class CodeRan(BaseException):
    """Code ran that nobody has named as trusted."""


def canary() -> None:
    raise CodeRan(CANARY)


_watching = [False]
_hooked: list[bool] = []


def _on_event(event: str, arguments: Any) -> None:
    if _watching[0] and event in ("pickle.find_class", "os.system", "subprocess.Popen"):
        raise CodeRan(f"{event}: {arguments!r}")


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Raise CodeRan within the block where anything is unpickled by name, or a process is started."""
    if not _hooked:
        sys.addaudithook(_on_event)  # It can't be removed.
        _hooked.append(True)
    _watching[0] = True
    try:
        yield
    finally:
        _watching[0] = False


def damaged(data: bytes, chance: random.Random) -> bytes:
    """Return `data` with one error: bits, bytes lost, added, doubled, or exchanged; a huge length; or cut short."""
    at, size = chance.randrange(len(data) + 1), chance.randint(1, 40)
    before, piece, after = data[:at], data[at : at + size], data[at + size :]
    flipped = bytes([piece[0] ^ 1 << chance.randrange(8)]) + piece[1:] if piece else b""
    other = chance.randrange(len(data) + 1)
    return chance.choice(
        [
            before + flipped + after,
            before + after,
            before + chance.randbytes(size) + piece + after,
            before + piece + piece + after,
            before + chance.randbytes(len(piece)) + after,
            before + b"\xff" * len(piece) + after,
            before + bytes(len(piece)) + after,
            before,
            before + data[other : other + size] + after,
            chance.randbytes(len(data)),
        ]
    )


def damaged_json(text: bytes, chance: random.Random) -> bytes:
    """Return the JSON with one value of another type, missing, doubled, exchanged, deeply nested, or a long number."""
    value = json.loads(text)
    path = chance.choice(list(_paths(value)))
    others = [*STRANGE, *STRANGE, _DEEP, _at(value, chance.choice(list(_paths(value))))]
    holder = _at(value, path[:-1]) if path else None
    if path and chance.random() < 0.2:  # The value is left out, or has another name.
        inner = holder.pop(path[-1])
        if isinstance(holder, dict):
            holder |= chance.choice([{}, {chance.choice(["", "x", "../x", "\ud800", *holder]): inner}])
        else:
            holder += chance.choice([[], [inner, copy.deepcopy(inner)]])
    elif path:
        holder[path[-1]] = copy.deepcopy(chance.choice(others))
    else:
        value = copy.deepcopy(chance.choice(others))
    changed = json.dumps(value)
    if _DEEP in changed:
        depth, long = chance.choice([40, 300, 900, 3000, 100_000]), chance.choice(["9" * 5000, "1e999", "-0.0"])
        nested = ["[" * depth + "]" * depth, '{"dict":' * depth + "0" + "}" * depth, "[" * depth, long]
        changed = changed.replace(json.dumps(_DEEP), chance.choice(nested))
    return changed.encode()


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the place of every value within a JSON value."""
    yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from _paths(inner, (*path, key))


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value
