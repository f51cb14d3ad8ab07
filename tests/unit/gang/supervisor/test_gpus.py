"""GPUs simulated by a fake nvidia-smi."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import tritium as tr
from tritium.errors import BadSetting, NotEnoughSlots
from tritium.gang.settings import Gang
from tritium.gang.supervisor.gpus import Listing, gpus_here


def nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, *uuids: str, says: str = "") -> None:
    """Simulate a machine with these GPUs."""
    lines = says or "\n".join(f'echo "GPU {index}: NVIDIA X (UUID: {uuid})"' for index, uuid in enumerate(uuids))
    program = folder / "nvidia-smi"
    query = 'case "$*" in -L) ;; *) exec seq 0 ' + str(len(uuids) - 1) + ";; esac\n"
    program.write_text(f"#!/bin/sh\n{query}{lines}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def where() -> tuple[Any, ...]:
    world = tr.world()
    return os.environ["CUDA_VISIBLE_DEVICES"], os.environ.get("CUDA_DEVICE_ORDER"), world.local_rank, world.device


def run(**settings: Any) -> list[Any]:
    return tr.launch(where, ranks=2, gpus=1, on="driver", progress=False, output="none", retries=0, **settings)


@pytest.mark.processes
def test_each_rank_has_its_own_in_the_order_of_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi(tmp_path, monkeypatch, "GPU-a", "GPU-b")
    assert run() == [("0,1", "PCI_BUS_ID", rank, f"cuda:{rank}") for rank in range(2)]


@pytest.mark.processes
def test_two_ranks_share_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def memory() -> tuple[str | None, str | None]:
        return os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION"), os.environ.get("TF_FORCE_GPU_ALLOW_GROWTH")

    nvidia_smi(tmp_path, monkeypatch, "GPU-a")
    settings: dict[str, Any] = {"on": "driver", "progress": False, "output": "none", "retries": 0, "gpus": 0.5}
    assert tr.launch(where, ranks=2, **settings) == [("0", "PCI_BUS_ID", rank, "cuda:0") for rank in range(2)]
    assert tr.launch(memory, ranks=(1, 4), **settings) == [("0.375", "true")] * 2
    with pytest.raises(NotEnoughSlots, match=r"3 rank\(s\) of gpus=0.5 need 2 GPU\(s\); this machine shows 1"):
        tr.launch(where, ranks=3, **settings)


@pytest.mark.processes
@pytest.mark.parametrize("visible", ["0,0", "GPU-a,GPU-a"])
def test_one_that_is_given_twice_is_refused(visible: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi(tmp_path, monkeypatch, "GPU-a", "GPU-b")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(BadSetting, match=r"Tasks 0 and 1 were given the same GPU, GPU-a: .* CUDA_VISIBLE_DEVICES"):
        run()


def test_parts_of_a_divided_gpu_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = "GPU 0: NVIDIA X (UUID: GPU-a)\n  MIG 1g.5gb     Device  0: (UUID: MIG-{})"
    nvidia_smi(tmp_path, monkeypatch, says=f"echo '{one.format(7)}\nGPU 1: NVIDIA X (UUID: GPU-b)'")
    assert listed() == {"0": "MIG-7", "1": "GPU-b"}
    nvidia_smi(tmp_path, monkeypatch, says=f"echo '{one.format(7)}\n  MIG 1g.5gb     Device  1: (UUID: MIG-8)'")
    assert listed() == {}, "nobody knows which is meant"


def test_of_one_that_can_not_be_run_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi(tmp_path, monkeypatch, "a")
    (tmp_path / "nvidia-smi").write_text("no program")
    assert listed() == {}


def listed() -> dict[str, str]:
    with closing(Listing()) as listing:
        return listing.uuids()


@pytest.mark.processes
@pytest.mark.parametrize("says", ["exit 9", "echo 'No devices were found'", "exec sleep 600"])
def test_of_one_that_says_nothing_nothing_is_said(says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tritium.gang.supervisor.gpus.LISTING_SECONDS", 0.2)
    nvidia_smi(tmp_path, monkeypatch, "a", "b", says=says)
    assert [answer[-1] for answer in run()] == ["cuda:0", "cuda:1"]


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        ("0, 1", ["0", "1"]),
        ("GPU-a,MIG-b/1/0,", ["GPU-a", "MIG-b/1/0"]),
        ("0,-1,1", ["0"]),
        ("1,NoDevFiles", ["1"]),
        ("-1", []),
        ("", []),
    ],
)
def test_those_before_the_first_that_is_none_are_visible(
    visible: str, found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if found:
        assert gpus_here(Gang(ranks=(1, 4), gpus=1)) == (found, len(found))
        return
    with pytest.raises(NotEnoughSlots, match=f"this machine shows 0 .CUDA_VISIBLE_DEVICES='{visible}'"):
        gpus_here(Gang(ranks=(1, 4), gpus=1))


def test_a_driver_that_does_not_answer_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tritium.gang.supervisor.gpus.LISTING_SECONDS", 0.2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    nvidia_smi(tmp_path, monkeypatch)
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 60\n")
    with pytest.raises(NotEnoughSlots, match=r"shows 0 \(nvidia-smi, which lists them, did not answer within 0\.2 s\)"):
        gpus_here(Gang(ranks=1, gpus=1))
