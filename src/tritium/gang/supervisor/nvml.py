"""A program that prints the GPUs of this machine as NVIDIA's management library knows them (a child of a supervisor).

A JSON list, with a list for each GPU: facts of it, and of each of its parts (MIG). Where the library is missing, or its
driver, the process becomes `nvidia-smi -L`. It imports nothing of Tritium, as its source alone is run.

With UUIDs as arguments it writes how much these are used into the file that is its stdout, each second, over what it
has written before, as long as the process that has started it lives.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any


def listed() -> list[list[dict[str, Any]]]:
    """Return the facts of every GPU and of its parts. Raises ImportError, and errors of the library."""
    nvml: Any = importlib.import_module("pynvml")
    nvml.nvmlInit()
    devices = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
    return [[_facts(nvml, device), *_parts(nvml, device)] for device in devices]


def watch(uuids: list[str]) -> None:
    """Write the use of these GPUs or parts until the parent has ended. Raises as `listed` does."""
    nvml: Any = importlib.import_module("pynvml")
    nvml.nvmlInit()
    devices = [nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
    parent = os.getppid()
    while os.getppid() == parent:
        used: dict[str, float] = {"gpu_memory": sum(int(nvml.nvmlDeviceGetMemoryInfo(d).used) for d in devices)}
        with contextlib.suppress(nvml.NVMLError):  # It is not known of a part.
            used["gpu"] = sum(nvml.nvmlDeviceGetUtilizationRates(d).gpu for d in devices) / len(devices) / 100
        os.pwrite(1, json.dumps(used).ljust(100).encode(), 0)
        time.sleep(1)


def _facts(nvml: Any, device: Any) -> dict[str, Any]:
    return {
        "uuid": _text(nvml.nvmlDeviceGetUUID(device)),
        "name": _text(nvml.nvmlDeviceGetName(device)),
        "memory": int(nvml.nvmlDeviceGetMemoryInfo(device).total),
        "driver": _text(nvml.nvmlSystemGetDriverVersion()),
    }


def _parts(nvml: Any, device: Any) -> Iterator[dict[str, Any]]:
    try:
        count = nvml.nvmlDeviceGetMaxMigDeviceCount(device)
    except nvml.NVMLError:  # This kind of GPU can't be divided.
        return
    for index in range(count):
        try:
            part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(device, index)
        except nvml.NVMLError:  # So many parts are possible, and this one does not exist.
            continue
        yield _facts(nvml, part)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


if __name__ == "__main__" and sys.argv[1:]:
    watch(sys.argv[1:])
elif __name__ == "__main__":
    try:
        print(json.dumps(listed()))  # noqa: T201 - the answer
    except Exception:  # noqa: BLE001 - whatever the library lacks, nvidia-smi may know
        os.execvp("nvidia-smi", ["nvidia-smi", "-L"])
