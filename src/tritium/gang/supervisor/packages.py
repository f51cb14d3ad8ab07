"""The packages of a gang, installed once on each host, for its rank processes alone (supervisor).

A folder of packages stands first on the path of the rank's process; Spark's own Python stays as it is.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from tritium import host_cache
from tritium.errors import BadSetting
from tritium.gang.order import Order
from tritium.gang.packages import Packages
from tritium.host_cache import CacheEntry
from tritium.wire import clip

ROOT = "TRITIUM_ENVIRONMENTS"
"""The variable that names the directory of all environments of a host."""
_KEPT = 4
"""So many environments stay for later gangs, beside those in use."""
_SHOWN_BYTES = 4000
_UV = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "cert": "SSL_CERT_FILE",
}
"""pip's setting → uv's variable."""
# The installer ends with this process, which Spark kills when the job is cancelled (Linux).
_BOOT = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None)["prctl"](1, 9)
os.execvp(sys.argv[1], sys.argv[1:])
"""


class Sends(Protocol):
    """The connection to the coordinator."""

    def send(self, kind: str, /, **fields: Any) -> None: ...


def with_packages(order: Order, channel: Sends) -> tuple[Order, CacheEntry]:
    """Return the order for a rank that has the packages of this order, and their environment; see `install`."""
    assert order.packages is not None
    environment = install(order.packages, lambda text: channel.send("note", text=text))
    after = order.env.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    path = os.pathsep.join(filter(None, (str(environment.path), after)))
    return replace(order, env={**order.env, "PYTHONPATH": path}), environment


def install(packages: Packages, tell: Callable[[str], object]) -> CacheEntry:
    """Return the environment of these packages; the first supervisor of a host installs it, and others wait.

    tell : takes a line about what is installed.

    Raises BadSetting with the installer's own words.
    """
    root = host_cache.root(ROOT, "tritium-environments", "ranks run the env_packages in it")
    folder = root / f"{packages.name}-py{sys.version_info[0]}{sys.version_info[1]}"
    environment = host_cache.entry(folder, lambda building: _make(packages, building, tell))
    host_cache.remove_old(root, _KEPT)
    return environment


def _make(packages: Packages, building: Path, tell: Callable[[str], object]) -> Path:
    shutil.rmtree(building, ignore_errors=True)  # Of a supervisor that was killed.
    target = building / "packages"
    target.mkdir(parents=True)
    for name, content in packages.files.items():
        (building / name).write_bytes(content)
    (building / "requirements.txt").write_text(packages.requirements, encoding="utf-8")
    installer = _installer()
    tell(f"installs env_packages with {installer[0]} on {socket.gethostname()}: {_listed(packages)}")
    began = time.monotonic()
    command = [*installer[1], "--target", str(target), "-r", "requirements.txt"]
    done = subprocess.run(
        [sys.executable, "-c", _BOOT, *command],
        cwd=building,
        env={**_settings_of_pip(), **os.environ} if installer[0] == "uv" else None,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    if done.returncode != 0:
        words = clip(done.stdout.decode(errors="replace").strip(), _SHOWN_BYTES)
        shutil.rmtree(building, ignore_errors=True)
        raise BadSetting(
            f"env_packages can't be installed on {socket.gethostname()}: {installer[0]} says\n{words}",
            setting="env_packages",
        )
    tell(f"env_packages are there after {time.monotonic() - began:.1f} s: {', '.join(versions(target))}")
    return target


def _installer() -> tuple[str, list[str]]:
    """Return the name of uv, or of pip where there is none, and its command."""
    if importlib.util.find_spec("uv") is not None:
        return "uv", [sys.executable, "-m", "uv", "pip", "install", "--python", sys.executable]
    if (uv := shutil.which("uv")) is not None:
        return "uv", [uv, "pip", "install", "--python", sys.executable]
    return "pip", [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]


def _settings_of_pip() -> dict[str, str]:
    """Return pip's settings of where packages come from, in uv's variables: uv does not read pip's files."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False
    )  # Without pip there are none.
    lines = re.findall(
        r"^(?:global|install|:env:)\.([\w-]+)='(.*)'$", done.stdout.decode(errors="replace"), re.MULTILINE
    )
    return {_UV[name]: value.replace("\\n", " ") for name, value in lines if name in _UV}


def _listed(packages: Packages) -> str:
    return ", ".join(line for line in packages.requirements.splitlines() if not line.startswith("-"))


def versions(folder: Path) -> list[str]:
    """Return "name version" of every package in an environment."""
    packages = importlib.metadata.distributions(path=[str(folder)])
    return sorted({f"{package.metadata['Name']} {package.version}" for package in packages}, key=str.lower)
