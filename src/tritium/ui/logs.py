"""Pages and searches of a log that may be large (driver)."""

from __future__ import annotations

import re
from typing import Any

from tritium.ui.folder import RunFolder

PAGE = 64 << 10
"""The bytes of one page of a log."""
_BLOCK = 4 << 20
HITS = 200
"""The most lines that one search returns."""
_LONGEST = 2000
"""The most characters of one line of a search."""


def page_before(place: RunFolder, name: str, end: int | None = None) -> dict[str, Any]:
    """Return the page of whole lines that ends at byte `end`; None: at the end of the file.

    Returns its `text`, the bytes `start` and `end` of it, and the `size` of the file.
    """
    size = place.size(name)
    end = size if end is None else max(0, min(end, size))
    start = max(0, end - PAGE)
    data = place.read(name, start, end)
    if start and 0 <= (cut := data.find(b"\n")) < len(data) - 1:
        start, data = start + cut + 1, data[cut + 1 :]
    return {"text": data.decode("utf-8", "replace"), "start": start, "end": end, "size": size}


def page_after(place: RunFolder, name: str, start: int) -> dict[str, Any]:
    """Return the page that begins at byte `start`, of whole characters, as `page_before` does."""
    size = place.size(name)
    if start > size:  # Another log is there.
        return page_before(place, name)
    data = _whole_characters(place.read(name, start, min(size, start + PAGE)))
    if start + len(data) < size and (cut := data.rfind(b"\n")) >= 0:
        data = data[: cut + 1]
    return {"text": data.decode("utf-8", "replace"), "start": start, "end": start + len(data), "size": size}


def _whole_characters(data: bytes) -> bytes:
    """Return the bytes without the first part of a character at their end."""
    for length in range(1, min(3, len(data)) + 1):
        if data[-length] & 0xC0 == 0xC0:
            needed = 2 + (data[-length] >= 0xE0) + (data[-length] >= 0xF0)
            return data[:-length] if needed > length else data
        if data[-length] < 0x80:
            return data
    return data


def search(place: RunFolder, name: str, text: str, start: int = 0) -> dict[str, Any]:
    """Return up to HITS lines from byte `start` on that contain `text`, small letters or capitals.

    Returns `hits`, each with the byte `at` which its line begins and its `text`; and `next`, the byte from which to
    search on, None at the end of the file.
    """
    pattern = re.compile(re.escape(text).encode(), re.IGNORECASE)
    size, hits = place.size(name), list[dict[str, Any]]()
    while start < size:
        data = place.read(name, start, min(size, start + _BLOCK))
        whole = len(data) if start + len(data) >= size else data.rfind(b"\n") + 1 or len(data)
        at = 0
        while (match := pattern.search(data, at, whole)) is not None:
            first = data.rfind(b"\n", 0, match.start()) + 1
            last = data.find(b"\n", match.end())
            at = whole if last < 0 else last + 1
            line = data[first : at if last < 0 else last]
            hits.append({"at": start + first, "text": line.decode("utf-8", "replace")[:_LONGEST]})
            if len(hits) == HITS:
                return {"hits": hits, "next": start + at if start + at < size else None, "size": size}
        start += whole
    return {"hits": hits, "next": None, "size": size}
