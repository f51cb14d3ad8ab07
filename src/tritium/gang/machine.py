"""The GPUs of this machine, for ranks that run on it without Spark (driver)."""

from __future__ import annotations

import os
import shutil
import subprocess

from tritium.errors import NotEnoughSlots
from tritium.gang.settings import Gang


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
