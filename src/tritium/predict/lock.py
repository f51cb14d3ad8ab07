"""`Lock`: a directory that one process holds until it ends, killed or not (driver)."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from typing import IO, Any

from tritium import file_system

LEASE_SECONDS = 60.0
"""On a store without locks, a lock that was not renewed for so long is taken for one of a killed process."""
NAME = "lock"


class Lock:
    """The file `lock` in a directory: locked, where that is on a local disk; elsewhere a lease, to be renewed."""

    def __init__(self, directory: str, lease: float = LEASE_SECONDS) -> None:
        self._files, root = file_system.opened(directory)
        self._path, self._lease, self._is_local = f"{root}/{NAME}", lease, "://" not in directory
        self._owner = f"{socket.gethostname()}, pid {os.getpid()}"
        self._renewed = 0.0
        """When the lease was written last; 0 where it was not taken."""
        self._file: IO[str] | None = None

    def take(self) -> str | None:
        """Take it, and return None; or return the process that has it."""
        if self._is_local:
            return self._take_file()
        try:
            lease: dict[str, Any] = json.loads(self._files.cat_file(self._path))
        except FileNotFoundError:
            lease = {"until": 0.0}
        if time.time() < lease["until"]:
            return str(lease["owner"])
        self._write()
        return None

    def renew(self) -> None:
        """Keep it, where it was taken and is a lease. Called at least once in a quarter of the lease."""
        if self._renewed and time.monotonic() - self._renewed > self._lease / 4:
            self._write()

    def release(self) -> None:
        """Let others take it."""
        if self._file is not None:
            self._file.close()
            self._file = None
        elif self._renewed:
            self._files.rm_file(self._path)
            self._renewed = 0.0

    def _take_file(self) -> str | None:
        file = open(self._path, "a+")  # noqa: SIM115 - Held open. Not truncated: another process's name may stand there.
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            owner = file.read().strip()
            file.close()
            return owner
        file.truncate(0)
        file.write(self._owner)
        file.flush()
        self._file = file
        return None

    def _write(self) -> None:
        lease = {"owner": self._owner, "until": time.time() + self._lease}
        self._files.pipe_file(self._path, json.dumps(lease).encode())
        self._renewed = time.monotonic()
