"""The format of one checkpoint: the names of its files, its manifest, and the loaded state (any process)."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from tritium.errors import MALFORMED, ModelError
from tritium.model import files
from tritium.model.forms import WHOLE, Requirement, check

MANIFEST = files.MANIFEST
REPLICATED = "replicated"
_FORMAT = 1
_SIZE = Requirement("a number of ranks, from 1 to 1,000,000", lambda value: WHOLE.fits(value) and 1 <= value <= 10**6)
_FORMS = {"step": WHOLE, "size": _SIZE, "files": files.FILES}
_NAME = re.compile(r"(\d{12})(?:-(\d+))?$")


def own(rank: int) -> str:
    """Return the name, without extension, of the files of a rank's own state."""
    return f"own-{rank}"


def is_name(name: str) -> bool:
    """Return whether `name` is that of a checkpoint's directory."""
    return _NAME.match(name) is not None


def order(name: str) -> tuple[int, int]:
    """Return the step of a checkpoint by its name, and the number of that step's save, from 1."""
    match = _NAME.match(name)
    assert match is not None
    return int(match[1]), int(match[2] or 1)


class Loaded(dict[Any, Any]):
    """A loaded state, with step, world size and path of its checkpoint."""

    def __init__(self, state: Mapping[Any, Any], *, step: int, size: int, own: list[Any], path: str) -> None:
        super().__init__(state)
        self.step = step
        self.size = size
        """The world size when it was saved."""
        self.own = own
        """The ranks' own states in rank order; None where a rank had none."""
        self.path = path


class Damaged(Exception):
    """A checkpoint can't be used; the text is a sentence on the reason, with file and numbers."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as its manifest describes it."""

    name: str
    step: int
    size: int
    files: Mapping[str, Mapping[str, Any]]

    @property
    def total(self) -> int:
        """The bytes of its files together."""
        return sum(int(facts["bytes"]) for facts in self.files.values())

    @classmethod
    def of(cls, name: str, text: bytes, where: str) -> Checkpoint:
        """Return the checkpoint of a manifest's `text`. Raises Damaged for the checkpoint at `where`."""
        try:
            manifest = json.loads(text)
            if manifest["format"] != _FORMAT:
                raise Damaged(
                    f"The checkpoint {where} has format {manifest['format']!r}, and this Tritium reads format "
                    f"{_FORMAT}. It was saved with {manifest.get('versions')}."
                )
            if manifest["sha256"] != _digest(manifest):
                raise ValueError("its own checksum does not fit it")
            check(manifest, _FORMS, MANIFEST)
            if manifest["step"] != order(name)[0]:
                raise ValueError(f"it is of step {manifest['step']}")
            return cls(name, manifest["step"], manifest["size"], manifest["files"])
        except (ModelError, *MALFORMED) as error:
            raise Damaged(
                f"{MANIFEST} of the checkpoint {where} is damaged ({len(text):,} bytes): {error!r}."
            ) from error

    def manifest(self) -> bytes:
        """Return the text of the manifest, with the current time and versions."""
        manifest: dict[str, Any] = {
            "format": _FORMAT,
            "step": self.step,
            "size": self.size,
            "saved": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            "versions": files.versions(),
            "files": self.files,
        }
        return json.dumps({**manifest, "sha256": _digest(manifest)}, indent=1).encode()


def _digest(manifest: Mapping[str, Any]) -> str:
    body = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
