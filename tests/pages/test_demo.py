"""The demo, started as a user does: it trains, scores a batch and a stream, and writes its picture."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(600)


def test_the_demo(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("tritium")), "demo"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=580)
    assert run.returncode == 0, run.stdout + run.stderr
    found = re.findall(r"^(.+): R² (\d\.\d+), RMSLE (\d\.\d+)$", run.stdout, re.MULTILINE)
    baseline, batch, stream = ((float(r2), float(rmsle)) for _, r2, rmsle in found)
    assert batch[0] >= 0.88
    assert batch[1] <= 0.36
    assert batch[0] > baseline[0] + 0.1
    assert stream == batch
    assert "epoch 20/20" in run.stdout
    picture = Path(str(re.search(r"^picture: (.+)$", run.stdout, re.MULTILINE)[1]))  # type: ignore[index]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert run.stdout.splitlines()[-1] == f"run directory: {picture.parent}"
    assert json.loads(picture.with_name("report.json").read_text())["ok"]
    assert len(list(picture.parent.glob("scored/*.parquet"))) >= 4
