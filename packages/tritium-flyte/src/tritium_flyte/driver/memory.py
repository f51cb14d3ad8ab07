"""More memory for the next attempt of a task that ran out of it (the driver of a task)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tritium.errors import BadSetting

SETTINGS = ("spark.executor.memory", "spark.executor.memoryOverhead")
"""What an executor has: Java's heap, and what ranks take beside it. An executor is killed over the sum of both."""
_SIZE = re.compile(r"(\d+)([bkmgtp]?)b?", re.IGNORECASE)
_UNITS = {"b": 0, "k": 10, "": 20, "m": 20, "g": 30, "t": 40, "p": 50}


def check(on_oom: Mapping[str, float], conf: Mapping[str, str]) -> None:
    """Raise BadSetting for a factor that raises nothing."""
    for name, factor in on_oom.items():
        if name not in SETTINGS:
            raise BadSetting(f"on_oom={{{name!r}: …}}: it raises one of {' and '.join(SETTINGS)}.", setting="on_oom")
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or factor <= 1:
            raise BadSetting(
                f"on_oom={{{name!r}: {factor!r}}} must be a factor above 1: 2 doubles it.", setting="on_oom"
            )
        if _SIZE.fullmatch(conf.get(name, "")) is None:
            raise BadSetting(
                f"on_oom raises {name}, which spark=Spark({{{name!r}: …}}) has to have, such as '4g': it is "
                f"{conf.get(name)!r}.",
                setting="on_oom",
            )


def raised(on_oom: Mapping[str, float], conf: Mapping[str, str], times: int) -> dict[str, str]:
    """Return the settings after so many attempts that ran out of memory, in MiB."""
    settings = {}
    for name, factor in on_oom.items():
        settings[name] = f"{int(in_bytes(conf[name]) * factor**times) >> 20}m"
    return settings


def in_bytes(size: str) -> int:
    """Return a size as Spark writes it, "4g" or "512m", in bytes; a number alone counts MiB. 0: it is no size."""
    match = _SIZE.fullmatch(size)
    return int(match[1]) << _UNITS[match[2].lower()] if match else 0


class Count:
    """How many attempts of a task ran out of memory: a small file beside its run directory.

    url : of the file, the same for all attempts.
    """

    def __init__(self, url: str) -> None:
        self._url = url

    def read(self) -> int:
        """Return the number so far."""
        files, path = self._opened()
        return int(files.cat_file(path)) if files.exists(path) else 0

    def add(self) -> None:
        """Count one more."""
        times = self.read() + 1
        files, path = self._opened()
        files.makedirs(path.rpartition("/")[0], exist_ok=True)
        files.pipe_file(path, str(times).encode())

    def _opened(self) -> tuple[Any, str]:
        import fsspec  # type: ignore[import-untyped]

        files, path = fsspec.core.url_to_fs(self._url)
        files.invalidate_cache()
        return files, str(path)
