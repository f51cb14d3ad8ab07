"""List the GPUs of this machine, for ranks without Spark (driver), and their kinds and UUIDs (supervisor)."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Reader:
    """A process that reads of the GPUs, and the file that it writes its answer to. Must be closed."""

    process: subprocess.Popen[bytes]
    answer: IO[bytes]

    @classmethod
    def started(cls, command: Sequence[str]) -> Reader | None:
        """Start a command; None if it can't be run, or the disk is full: then nothing is known."""
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            answer = stack.enter_context(tempfile.TemporaryFile())  # No pipe: a child may hold it.
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=answer, stderr=subprocess.DEVNULL)
            stack.pop_all()
            return cls(process, answer)
        return None

    def close(self) -> None:
        """End the process if it still runs."""
        self.process.kill()
        self.process.wait()
        self.answer.close()


def _nvml(*uuids: str) -> list[str]:
    """Return the command that runs nvml.py, of which executors may have only the zip."""
    return [sys.executable, "-c", inspect.getsource(nvml), *uuids]


class Listing:
    """The GPUs that this task can see, read in the background, as it may take seconds. Must be closed.

    They are read by nvidia-ml-py where it is installed, else by nvidia-smi, which is asked for names and UUIDs only: in
    a process, as a driver that hangs must not hang the supervisor.
    """

    def __init__(self, addresses: Sequence[str] = ()) -> None:
        self._addresses = addresses
        self._watch: Reader | None = None
        """What reads how much the task's GPUs are used."""
        if find_spec("pynvml") is not None:
            self._list = Reader.started(_nvml())
        elif command := shutil.which("nvidia-smi"):
            self._list = Reader.started([command, "-L"])
        else:
            self._list = None

    def facts(self) -> dict[str, dict[str, Any]]:
        """Return index → facts of every visible GPU, the fields of a Device; empty where nothing answers.

        A divided GPU (MIG) gives those of its part if only one is visible, and is left out if several are, as it is not
        known which one is meant.
        """
        if self._list is None:
            return {}
        try:
            self._list.process.wait(LISTING_SECONDS)
        except subprocess.TimeoutExpired:
            return {}
        self._list.answer.seek(0)
        text = self._list.answer.read().decode("utf-8", "replace")
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
        if uuids and find_spec("pynvml") is not None:
            self._watch = Reader.started(_nvml(*uuids))

    def used(self) -> dict[str, float]:
        """Return `gpu`, the share of time in which the GPUs computed, and `gpu_memory` in bytes, where known."""
        if self._watch is None or self._watch.process.poll() is not None:
            return {}
        try:
            return dict(json.loads(os.pread(self._watch.answer.fileno(), 100, 0)))
        except ValueError:  # It has not been read yet.
            return {}

    def close(self) -> None:
        """End the processes that still run."""
        for reader in (self._list, self._watch):
            if reader is not None:
                reader.close()


def executor() -> str:
    """Return an id of this executor on its host: the pid of its Python daemon, and that pid's namespace."""
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:  # Only Linux has such namespaces.
        namespace = 0
    return f"{namespace}-{os.getppid()}"
