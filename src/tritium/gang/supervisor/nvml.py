"""A program that prints the GPUs of this machine as NVIDIA's management library knows them (a child of a supervisor).

A JSON list, with a list for each GPU: facts of it, and of each of its parts (MIG). Where the library is missing, or its
driver, the process becomes `nvidia-smi -L`. It imports nothing of Tritium, as its source alone is run.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterator
from typing import Any


def listed() -> list[list[dict[str, Any]]]:
    """Return the facts of every GPU and of its parts. Raises ImportError, and errors of the library."""
    nvml: Any = importlib.import_module("pynvml")
    nvml.nvmlInit()
    devices = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
    return [[_facts(nvml, device), *_parts(nvml, device)] for device in devices]


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


if __name__ == "__main__":
    try:
        print(json.dumps(listed()))  # noqa: T201 - the answer
    except Exception:  # noqa: BLE001 - whatever the library lacks, nvidia-smi may know
        os.execvp("nvidia-smi", ["nvidia-smi", "-L"])
