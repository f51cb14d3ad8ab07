"""The packages of a gang, installed once on each host, for its rank processes alone (supervisor).

A folder of packages stands first on the path of the rank's process; Spark's own Python stays as it is.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from tritium.errors import BadSetting
from tritium.gang.order import Order
from tritium.gang.packages import Packages
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


class Environment:
    """An installed environment that is in use until `close`.

    path : its directory, to be put on PYTHONPATH.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._folder = os.open(path, os.O_RDONLY)
        fcntl.flock(self._folder, fcntl.LOCK_SH)

    def close(self) -> None:
        """Let it be removed, when more recent ones need its place."""
        os.close(self._folder)


def with_packages(order: Order, channel: Sends) -> tuple[Order, Environment]:
    """Return the order for a rank that has the packages of this order, and their environment; see `install`."""
    assert order.packages is not None
    environment = install(order.packages, lambda text: channel.send("note", text=text))
    after = order.env.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    path = os.pathsep.join(filter(None, (str(environment.path), after)))
    return replace(order, env={**order.env, "PYTHONPATH": path}), environment


def install(packages: Packages, tell: Callable[[str], object]) -> Environment:
    """Return the environment of these packages; the first supervisor of a host installs it, and others wait.

    tell : takes a line about what is installed.

    Raises BadSetting with the installer's own words.
    """
    root = _root()
    folder = root / f"{packages.name}-py{sys.version_info[0]}{sys.version_info[1]}"
    with _changing(folder):
        if not folder.exists():
            _make(packages, folder, tell)
        os.utime(folder)
        environment = Environment(folder)
    _remove_old(root)
    return environment


@contextmanager
def _changing(folder: Path) -> Iterator[None]:
    """Hold the lock under which an environment is made, removed, or taken into use."""
    with open(f"{folder}.lock", "a", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _root() -> Path:
    """Return the directory of environments. Raises BadSetting for one that others may write: its content is run."""
    root = Path(os.environ.get(ROOT) or Path(tempfile.gettempdir(), f"tritium-environments-{os.getuid()}"))
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = root.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise BadSetting(
            f"env_packages: {root} on {socket.gethostname()} could be written by another user, and ranks run what is "
            f"in it. Remove it, or name another directory by {ROOT} (spark.executorEnv.{ROOT}).",
            path=str(root),
        )
    return root


def _make(packages: Packages, folder: Path, tell: Callable[[str], object]) -> None:
    building = folder.with_suffix(".part")
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
    target.rename(folder)
    shutil.rmtree(building)
    tell(f"env_packages are there after {time.monotonic() - began:.1f} s: {', '.join(versions(folder))}")


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


def _remove_old(root: Path) -> None:
    """Remove the environments that were not used for longest, but for _KEPT and those in use."""
    folders = [path for path in root.iterdir() if path.is_dir() and path.suffix != ".part"]
    for folder in sorted(folders, key=os.path.getmtime)[:-_KEPT]:
        with _changing(folder), suppress(FileNotFoundError):  # Another supervisor may have removed it.
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            except BlockingIOError:  # A rank uses it.
                continue
            finally:
                os.close(descriptor)
