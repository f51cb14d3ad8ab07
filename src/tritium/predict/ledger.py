"""The record of a scoring that resumes: whose it is, and its finished parts (driver).

<directory>/run.json         what is scored, by which model, into which target
            part-<id>.json   one part: its source partitions, and when it is finished its fingerprint and its output
            lock             held by the process that scores
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from tritium import file_system
from tritium.errors import BadSetting
from tritium.predict.lock import LEASE_SECONDS, Lock

_RUN = "run.json"


@dataclass
class Part:
    """Some consecutive source partitions that are scored by one Spark job, and what became of them."""

    first: int
    """The first source partition."""
    count: int
    id: str = field(default_factory=lambda: secrets.token_hex(6))
    fingerprint: tuple[int, int, int] | None = None
    """Rows, and two sums of their hashes; None while the part is not finished."""
    output: dict[str, Any] = field(default_factory=dict)
    """What the target knows its output by."""

    @property
    def partitions(self) -> range:
        """The source partitions."""
        return range(self.first, self.first + self.count)


class Ledger:
    """A directory, local or an fsspec URL, that records parts. Each file is written under another name and renamed."""

    def __init__(self, directory: str) -> None:
        self.directory = directory.rstrip("/")
        self._files, self._root = file_system.opened(self.directory)
        self._is_local = "://" not in directory
        self.lock = Lock(self.directory)

    def run(self) -> dict[str, Any] | None:
        """Return what `begin` has recorded; None in a new directory."""
        facts: dict[str, Any] | None = self._read(_RUN)
        return facts

    def begin(self, facts: Mapping[str, Any]) -> None:
        """Record whose parts these are."""
        self._write(_RUN, facts)

    def parts(self) -> list[Part]:
        """Return all recorded parts, in the order of their source partitions."""
        names = (str(path).rpartition("/")[2] for path in self._files.ls(self._root, detail=False, refresh=True))
        texts = [self._read(name) for name in names if name.startswith("part-") and name.endswith(".json")]
        parts = [Part(**{**text, "fingerprint": _tuple(text["fingerprint"])}) for text in texts if text is not None]
        return sorted(parts, key=lambda part: part.first)

    def record(self, part: Part) -> None:
        """Write a part's record, in place of an earlier one."""
        self._write(f"part-{part.id}.json", asdict(part))

    def forget(self, part: Part) -> None:
        """Remove a part's record."""
        self._files.rm_file(f"{self._root}/part-{part.id}.json")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the directory's lock, and make the directory. Raises BadSetting where another process holds it."""
        try:
            self._files.makedirs(self._root, exist_ok=True)
        except OSError as error:
            raise BadSetting(f"resume={self.directory!r} can't be made: {error}.", setting="resume") from error
        if (owner := self.lock.take()) is not None:
            more = "" if self._is_local else f" If it was killed, its lock ends after {LEASE_SECONDS:.0f} s."
            raise BadSetting(
                f"resume={self.directory!r} is in use by another scoring ({owner}). Wait for its end, or choose "
                f"another directory.{more}",
                setting="resume",
            )
        try:
            yield
        finally:
            self.lock.release()

    def _read(self, name: str) -> Any:
        try:
            return json.loads(file_system.read(f"{self.directory}/{name}"))
        except FileNotFoundError:
            return None

    def _write(self, name: str, value: Mapping[str, Any]) -> None:
        path = f"{self._root}/{name}"
        data = json.dumps(value, indent=1).encode()
        if not self._is_local:  # A store shows an object when it is whole.
            self._files.pipe_file(path, data)
            return
        with open(f"{path}.new", "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(f"{path}.new", path)


def _tuple(values: list[int] | None) -> tuple[int, int, int] | None:
    return None if values is None else (values[0], values[1], values[2])
