"""What the tests of this folder share: without an NVIDIA GPU they are skipped."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="needs an NVIDIA GPU (no nvidia-smi here)"),
    pytest.mark.timeout(300),
]
ON_GPU: dict[str, Any] = {"on": "driver", "ranks": 1, "gpus": 1, "retries": 0, "progress": False, "output": "none"}
