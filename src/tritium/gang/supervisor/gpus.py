"""List the GPUs of this machine, for ranks without Spark (driver), and their kinds and UUIDs (supervisor)."""

from __future__ import annotations

import contextlib
import inspect
import io
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from typing import IO, Any

from tritium.accelerators import Accelerators
from tritium.errors import NotEnoughSlots
from tritium.gang.settings import Gang
from tritium.gang.supervisor import nvml

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
_LINE = re.compile(r"(\s*)(?:GPU \d+: )?(.*?)\s*(?:Device +\d+: *)?\(UUID: ([^)]+)\)")
"""A line of `nvidia-smi -L`: a GPU, or an indented part of the one before (MIG)."""


class Listing:
    """The GPUs that this task can see, read in the background, as it may take seconds. Must be closed.

    They are read by nvidia-ml-py where it is installed, else by nvidia-smi, which is asked for names and UUIDs only: in
    a process, as a driver that hangs must not hang the supervisor.
    """

    def __init__(self, addresses: Sequence[str] = ()) -> None:
        self._addresses = addresses
        self._process: subprocess.Popen[bytes] | None = None
        self._answer: IO[bytes] = io.BytesIO()
        self._watch: tuple[subprocess.Popen[bytes], IO[bytes]] | None = None
        """The process that reads how much the task's GPUs are used, and its output."""
        command = [shutil.which("nvidia-smi") or "", "-L"]
        if find_spec("pynvml") is not None:
            command = [sys.executable, "-c", inspect.getsource(nvml)]  # Executors may have Tritium as a zip.
        if not command[0]:
            return
        with contextlib.suppress(OSError):  # If it can't be run, or the disk is full, no UUID is known.
            self._answer = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `close`. No pipe: a child may hold it
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=self._answer, stderr=subprocess.DEVNULL
            )

    def facts(self) -> dict[str, dict[str, Any]]:
        """Return index → facts of every visible GPU, the fields of a Device; empty where nothing answers.

        A divided GPU (MIG) gives those of its part if only one is visible, and is left out if several are, as it is not
        known which one is meant.
        """
        if self._process is None:
            return {}
        try:
            self._process.wait(LISTING_SECONDS)
        except subprocess.TimeoutExpired:
            return {}
        self._answer.seek(0)
        text = self._answer.read().decode("utf-8", "replace")
        devices: list[list[dict[str, Any]]] = json.loads(text) if text.startswith("[") else []
        for line in text.splitlines() if not devices else ():
            if match := _LINE.match(line):
                if not match[1]:
                    devices.append([{"name": match[2], "uuid": match[3]}])
                elif devices:
                    devices[-1].append({"name": f"{devices[-1][0]['name']} {match[2]}", "uuid": match[3]})
        return {str(index): parts[-1] for index, parts in enumerate(devices) if len(parts) <= 2}

    def uuids(self) -> dict[str, str]:
        """Return index → UUID of every visible GPU; see `facts`."""
        return {index: str(facts["uuid"]) for index, facts in self.facts().items()}

    def assigned(self) -> dict[str, dict[str, Any]]:
        """Return address → facts of the GPUs that are this task's, where they are known. An address may be a UUID."""
        known = self.facts()
        known |= {facts["uuid"]: facts for facts in known.values()}
        return {address: known[address] for address in self._addresses if address in known}

    def watch(self, uuids: Sequence[str]) -> None:
        """Begin to read how much these GPUs are used, where nvidia-ml-py is installed."""
        if not uuids or find_spec("pynvml") is None:
            return
        with contextlib.suppress(OSError):  # If it can't be run, or the disk is full, nothing is known.
            answer = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `close`
            command = [sys.executable, "-c", inspect.getsource(nvml), *uuids]
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=answer, stderr=subprocess.DEVNULL)
            self._watch = process, answer

    def used(self) -> dict[str, float]:
        """Return `gpu`, the share of time in which the GPUs computed, and `gpu_memory` in bytes, where known."""
        if self._watch is None or self._watch[0].poll() is not None:
            return {}
        try:
            return dict(json.loads(os.pread(self._watch[1].fileno(), 100, 0)))
        except ValueError:  # It has not been read yet.
            return {}

    def close(self) -> None:
        """End the processes that still run."""
        if self._watch is not None:
            process, answer = self._watch
            process.kill()
            process.wait()
            answer.close()
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
