"""GPUs without one here: an nvidia-smi that only says what it is told to."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import tritium as tr
from tritium.errors import BadSetting


def nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, *uuids: str, says: str = "") -> None:
    """A machine with these GPUs."""
    lines = says or "\n".join(f'echo "{index}, {uuid}"' for index, uuid in enumerate(uuids))
    program = folder / "nvidia-smi"
    query = 'case "$*" in *uuid*) ;; *) exec seq 0 ' + str(len(uuids) - 1) + ";; esac\n"
    program.write_text(f"#!/bin/sh\n{query}{lines}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def where() -> tuple[Any, ...]:
    world = tr.world()
    return os.environ["CUDA_VISIBLE_DEVICES"], os.environ.get("CUDA_DEVICE_ORDER"), world.local_rank, world.device


def run(**settings: Any) -> list[Any]:
    return tr.launch(where, ranks=2, gpus=1, on="driver", progress=False, output="none", retries=0, **settings)


def test_each_rank_has_its_own_in_the_order_of_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi(tmp_path, monkeypatch, "GPU-a", "GPU-b")
    assert run() == [("0,1", "PCI_BUS_ID", rank, f"cuda:{rank}") for rank in range(2)]


@pytest.mark.parametrize("visible", ["0,0", "GPU-a,GPU-a"])
def test_one_that_is_given_twice_is_refused(visible: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi(tmp_path, monkeypatch, "GPU-a", "GPU-b")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(BadSetting, match=r"Tasks 0 and 1 were given the same GPU, GPU-a: .* CUDA_VISIBLE_DEVICES"):
        run()


@pytest.mark.parametrize("says", ["exit 9", "echo 'No devices were found'", "exec sleep 600"])
def test_of_one_that_says_nothing_nothing_is_said(says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tritium.gang.machine.LISTING_SECONDS", 0.2)
    nvidia_smi(tmp_path, monkeypatch, "a", "b", says=says)
    assert [answer[-1] for answer in run()] == ["cuda:0", "cuda:1"]
