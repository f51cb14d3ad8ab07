"""The GPUs of this machine: for ranks that run on it without Spark (driver), and which ones they are (supervisor)."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import subprocess
import tempfile
from typing import IO

from tritium.errors import NotEnoughSlots
from tritium.gang.settings import Gang

LISTING_SECONDS = 10.0  # how long nvidia-smi may take; some drivers need seconds to wake up


def gpus_here(gang: Gang) -> tuple[list[str], int]:
    """The addresses of this machine's GPUs, and the world size; NotEnoughSlots when the gang asks for more GPUs.

    `CUDA_VISIBLE_DEVICES` limits them, as it does for any other program.
    """
    if not gang.gpus:
        return [], gang.most
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = [g.strip() for g in visible.split(",") if g.strip()] if visible is not None else _listed()
    needed = gang.least * gang.gpus
    if len(found) < needed:
        limit = f" (CUDA_VISIBLE_DEVICES={visible!r})" if visible is not None else " (nvidia-smi lists them)"
        raise NotEnoughSlots(
            f"{gang.least} rank(s) of gpus={gang.gpus} need {needed} GPU(s); this machine shows {len(found)}{limit}. "
            "A gang never falls back to CPUs; gpus=0 asks for them.",
            needed=needed,
            available=len(found),
        )
    return found, min(gang.most, len(found) // gang.gpus)


def _listed() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False)
    return answer.stdout.split() if answer.returncode == 0 else []


_GPU = re.compile(r"GPU (\d+): .*\(UUID: ([^)]+)\)")
_MIG = re.compile(r"\s+MIG .*\(UUID: ([^)]+)\)")


class Listing:
    """The GPUs that nvidia-smi shows here, asked in the background: it may take seconds. `close()` it."""

    def __init__(self) -> None:
        program = shutil.which("nvidia-smi")
        self._process: subprocess.Popen[bytes] | None = None
        self._answer: IO[bytes] = io.BytesIO()
        if program is None:
            return
        with contextlib.suppress(OSError):  # it can't be run, or there is no room: then nothing is known
            self._answer = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `close`. No pipe: a child may hold it
            self._process = subprocess.Popen(
                [program, "-L"], stdin=subprocess.DEVNULL, stdout=self._answer, stderr=subprocess.DEVNULL
            )

    def uuids(self) -> dict[str, str]:
        """Index -> UUID of every GPU that this process can see; empty where nvidia-smi is absent or does not answer.

        Of a GPU that is divided (MIG) several processes may each have a part, which has a UUID of its own: where there
        is only one part, it is that one's, and where there are several, nobody knows which is meant.
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
            if found := _GPU.match(line):
                parts[found[1]] = [found[2]]
            elif parts and (found := _MIG.match(line)):
                parts[list(parts)[-1]].append(found[1])
        return {index: uuids[-1] for index, uuids in parts.items() if len(uuids) <= 2}

    def close(self) -> None:
        """End nvidia-smi if it still runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._answer.close()


def executor() -> str:
    """What tells this executor from others of its host: its Python workers' parent, and the namespace of that pid."""
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:  # no Linux: no such namespaces
        namespace = 0
    return f"{namespace}-{os.getppid()}"
