"""The engine processes of pretended devices that a test has started, which would wait a minute for another task."""

from __future__ import annotations

import os

import psutil


def running() -> list[psutil.Process]:
    """Return those of this test process."""
    return [
        process
        for process in psutil.process_iter(["cmdline", "environ"])
        if "tritium.predict.engine_process" in " ".join(process.info["cmdline"] or ())
        and (process.info["environ"] or {}).get("TRITIUM_TEST") == str(os.getpid())
    ]


def end() -> None:
    """Kill them, and wait for their end."""
    for process in running():
        process.kill()
        process.wait()
