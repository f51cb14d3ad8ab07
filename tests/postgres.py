"""A real PostgreSQL server for tests."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker import free_ports

DATABASE = "bikes"


def _program(name: str) -> str:
    folders = [*os.environ["PATH"].split(os.pathsep), *map(str, Path("/usr/lib/postgresql").glob("*/bin"))]
    program = shutil.which(name, path=os.pathsep.join(folders))
    if program is None:
        pytest.skip(f"there is no {name} (Debian: apt-get install postgresql)")
    return program


def _as_user() -> tuple[list[str], str | None]:
    """Return the words before a command that a user runs which is not root, and that user; PostgreSQL refuses root."""
    if os.geteuid():
        return [], None
    if shutil.which("setpriv") is None:
        pytest.skip("PostgreSQL refuses to run as root, and there is no setpriv")
    names = {entry.pw_name for entry in pwd.getpwall()}
    user = next((name for name in ("postgres", "nobody") if name in names), None)
    if user is None:
        pytest.skip("PostgreSQL refuses to run as root, and there is no other user")
    return ["setpriv", f"--reuid={user}", f"--regid={pwd.getpwnam(user).pw_gid}", "--clear-groups"], user


@contextlib.contextmanager
def postgres() -> Iterator[str]:
    """Yield "127.0.0.1:<port>" of a server with the database and superuser `bikes`, without a password."""
    control, initdb, (before, user) = _program("pg_ctl"), _program("initdb"), _as_user()
    # The user needs a way to it, which the directory of the tests is not.
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="postgres-") as folder, free_ports(1) as (port,):
        if user:
            shutil.chown(folder, user)
        data = f"{folder}/data"
        settings = {"listen_addresses": "127.0.0.1", "port": str(port), "unix_socket_directories": "", "fsync": "off"}
        options = " ".join(f"-c {name}={value!r}" for name, value in settings.items())

        def run(*command: str) -> None:
            done = subprocess.run([*before, *command], stdout=subprocess.DEVNULL, timeout=120, check=False, cwd=folder)
            assert done.returncode == 0, Path(folder, "log").read_text()[-2000:]

        run(initdb, "-D", data, "-U", DATABASE, "--auth=trust", "--no-sync")
        run(control, "start", "-w", "-D", data, "-l", f"{folder}/log", "-o", options)
        try:
            execute(f"127.0.0.1:{port}", f"CREATE DATABASE {DATABASE}", database="postgres")
            yield f"127.0.0.1:{port}"
        finally:
            run(control, "stop", "-w", "-m", "immediate", "-D", data)


def execute(address: str, sql: str, database: str = DATABASE) -> str:
    """Return what psql prints for these statements."""
    host, _, port = address.partition(":")
    command = [
        _program("psql"),
        "-X",
        "-q",
        "-A",
        "-t",
        "-v",
        "ON_ERROR_STOP=1",
        "-h",
        host,
        "-p",
        port,
        "-U",
        DATABASE,
    ]
    done = subprocess.run(
        [*command, "-d", database, "-c", sql], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
