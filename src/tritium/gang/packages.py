"""The packages that a gang has for itself, `env_packages`, as the driver reads them (driver, supervisor)."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tritium.errors import BadSetting

_FILE = re.compile(r"(?:[\w.-]+(?:\[[\w.,\s-]*\])?\s*@\s*)?(?P<path>[^\s;]+\.(?:whl|tar\.gz|zip))\s*$")
_REFUSED = ("-e", "--editable", "-r", "--requirement", "-c", "--constraint")


@dataclass(frozen=True)
class Packages:
    """What is installed for the ranks of a gang.

    requirements : the text of a requirements file.
    files        : name → content of the wheels and archives that it names.
    """

    requirements: str
    files: Mapping[str, bytes]

    @classmethod
    def read(cls, wanted: str | Sequence[str]) -> Packages | None:
        """Return those of the setting `env_packages`; None where there are none.

        wanted : the path of a requirements file, or its lines. Paths of wheels are relative to that file, or to here.

        Raises BadSetting for a line that can't be shipped, and for a file that does not exist.
        """
        if isinstance(wanted, str):
            try:
                with open(wanted, encoding="utf-8") as file:
                    lines, folder = file.read().splitlines(), os.path.dirname(wanted)
            except OSError as error:
                raise BadSetting(
                    f"env_packages={wanted!r} must be the path of a requirements file, or a list of its lines "
                    f'(["torch==2.13", "./dist/ours.whl"]): {error}.',
                    setting="env_packages",
                ) from None
        else:
            lines, folder = list(wanted), ""
        files: dict[str, bytes] = {}
        shipped = list(_shipped(lines, folder, files))
        return cls("\n".join(shipped) + "\n", files) if shipped else None

    @property
    def name(self) -> str:
        """A name that only these packages have."""
        digest = hashlib.sha256(self.requirements.encode())
        for file, content in sorted(self.files.items()):
            digest.update(file.encode() + hashlib.sha256(content).digest())
        return digest.hexdigest()[:16]


def _shipped(lines: Sequence[str], folder: str, files: dict[str, bytes]) -> Iterator[str]:
    """Yield the lines as an executor reads them, and put the files that they name into `files`."""
    for text in lines:
        line = re.sub(r"(^|\s)#.*", "", text).strip()
        if not line:
            continue
        if line.split("=")[0].split()[0] in _REFUSED:
            raise BadSetting(
                f"env_packages: {line!r} names something that is on this machine alone. Build a wheel, and give its "
                "path; write the lines of other files here.",
                setting="env_packages",
            )
        named = _FILE.match(line)
        if named is None or "://" in line or line.startswith("-"):
            yield line
            continue
        path, name = os.path.join(folder, os.path.expanduser(named["path"])), os.path.basename(named["path"])
        try:
            with open(path, "rb") as file:
                files[name] = file.read()
        except OSError as error:
            raise BadSetting(
                f"env_packages: {line!r} names the file {path}, which can't be read: {error.strerror}.",
                setting="env_packages",
            ) from None
        yield f"./{name}"
