"""The random generators of a rank: seeded, and their states as a checkpoint keeps them (rank)."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from tritium.ml.torch.settings import TorchSettings


def seed_generators(settings: TorchSettings, seed: int) -> None:
    """Seed torch, and where there is a transform, which may draw from them, NumPy and Python's `random`."""
    torch.manual_seed(seed)
    if settings.transform is not None:
        np.random.seed(seed % 2**32)
        random.seed(seed)


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the states of the generators of torch (CPU and this device), NumPy and Python."""
    state = {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}
    return state | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Restore what `random_state` returned."""
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
