"""What tests of engine processes share: a model as tasks send it, and the end of those that wait for another task."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import psutil

import tritium as tr
from tritium.model.calls import Computing
from tritium.predict.spark import _plan


def plan_of(model: tr.Model) -> tuple[dict[str, Any], Any]:
    """Return what a worker has of a model that is scored on `cpu:0`: the plan, and the handle of the weights."""
    parts = model.engine.save(by_value=True)
    sent = SimpleNamespace(value=[bytes(piece) for piece in parts.weights.stream()])
    settings = {"computes": Computing(), "device": "cpu:0", "transform": None}
    return {**_plan(model, parts, f"{parts.weights.digest()}.weights"), **settings}, sent


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
