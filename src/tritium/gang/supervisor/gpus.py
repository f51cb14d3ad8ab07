"""List the GPUs of this machine, for ranks without Spark (driver), and their UUIDs (supervisor)."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import shutil
import subprocess
import tempfile
from typing import IO

from tritium.accelerators import Accelerators
from tritium.errors import NotEnoughSlots
from tritium.gang.settings import Gang

LISTING_SECONDS = 10.0  # Some drivers need seconds to wake up.


def gpus_here(gang: Gang) -> tuple[list[str], int]:
    """Return the addresses of this machine's GPUs, and the world size that they allow.

    `CUDA_VISIBLE_DEVICES` limits them, as for any other program. Raises NotEnoughSlots for less than `gang.least`.
    """
    if not gang.gpus:
        return [], gang.most
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    addresses, source = _listed() if visible is None else (_visible(visible), f"CUDA_VISIBLE_DEVICES={visible!r}")
    accelerators = Accelerators.of(gang)
    needed = -(-gang.least * accelerators.whole // accelerators.sharers)
    if len(addresses) < needed:
        raise NotEnoughSlots(
            f"{gang.least} rank(s) of gpus={gang.gpus:g} need {needed} GPU(s); this machine shows {len(addresses)} "
            f"({source}). A gang never falls back to CPUs; gpus=0 asks for them.",
            needed=needed,
            available=len(addresses),
        )
    return addresses, min(gang.most, accelerators.ranks_of(len(addresses)))


def _visible(value: str) -> list[str]:
    """Return the GPUs of a CUDA_VISIBLE_DEVICES: those before the first entry that names none, as for CUDA."""
    return list(itertools.takewhile(_ENTRY.fullmatch, map(str.strip, value.split(","))))


def _listed() -> tuple[list[str], str]:
    """Return the indices of all GPUs, and the source of that knowledge, for messages."""
    if shutil.which("nvidia-smi") is None:
        return [], "nvidia-smi, which lists them, is not on the PATH"
    query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=False, timeout=LISTING_SECONDS)
    except subprocess.TimeoutExpired:
        return [], f"nvidia-smi, which lists them, did not answer within {LISTING_SECONDS:g} s"
    return answer.stdout.split() if answer.returncode == 0 else [], "nvidia-smi lists them"


_ENTRY = re.compile(r"\d+|(GPU|MIG)-\S+")
_GPU = re.compile(r"GPU (\d+): .*\(UUID: ([^)]+)\)")
_MIG = re.compile(r"\s+MIG .*\(UUID: ([^)]+)\)")


class Listing:
    """The GPUs that nvidia-smi lists, read in the background, as it may take seconds. Must be closed."""

    def __init__(self) -> None:
        program = shutil.which("nvidia-smi")
        self._process: subprocess.Popen[bytes] | None = None
        self._answer: IO[bytes] = io.BytesIO()
        if program is None:
            return
        with contextlib.suppress(OSError):  # If it can't be run, or the disk is full, no UUID is known.
            self._answer = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `close`. No pipe: a child may hold it
            self._process = subprocess.Popen(
                [program, "-L"], stdin=subprocess.DEVNULL, stdout=self._answer, stderr=subprocess.DEVNULL
            )

    def uuids(self) -> dict[str, str]:
        """Return index → UUID of every visible GPU; empty where nvidia-smi is absent or does not answer.

        A divided GPU (MIG) gives the UUID of its instance if only one is visible, and is left out if several are, as it
        is not known which one is meant.
        """
        if self._process is None:
            return {}
        try:
            self._process.wait(LISTING_SECONDS)
        except subprocess.TimeoutExpired:
            return {}
        self._answer.seek(0)
        parts: dict[str, list[str]] = {}
        for line in self._answer.read().decode("utf-8", "replace").splitlines():
            if match := _GPU.match(line):
                parts[match[1]] = [match[2]]
            elif parts and (match := _MIG.match(line)):
                parts[list(parts)[-1]].append(match[1])
        return {index: uuids[-1] for index, uuids in parts.items() if len(uuids) <= 2}

    def close(self) -> None:
        """End nvidia-smi if it still runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._answer.close()


def executor() -> str:
    """Return an id of this executor on its host: the pid of its Python daemon, and that pid's namespace."""
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:  # Only Linux has such namespaces.
        namespace = 0
    return f"{namespace}-{os.getppid()}"
