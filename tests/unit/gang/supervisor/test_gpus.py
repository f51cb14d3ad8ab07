"""GPUs simulated by a fake nvidia-smi."""

from __future__ import annotations

import json
import os
import time
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import tritium as tr
from tritium.errors import BadSetting, NotEnoughSlots
from tritium.gang.driver.told import told
from tritium.gang.rank.peers import Device
from tritium.gang.settings import Gang
from tritium.gang.supervisor.gpus import Listing, gpus_here
from tritium.ui import prometheus
from tritium.ui.folder import RunFolder
from tritium.ui.runs import Runs, RunView


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


NVML = """
class NVMLError(Exception):
    pass

def nvmlInit():
    pass

def nvmlDeviceGetCount():
    return {count}

def nvmlDeviceGetHandleByIndex(index):
    return "NVIDIA H100 80GB HBM3" if index < {h100} else "NVIDIA A100-SXM4-80GB", index

def nvmlDeviceGetUUID(device):
    return f"GPU-{{device[1]}}"

def nvmlDeviceGetName(device):
    return device[0].encode()  # as older versions of the library do

class nvmlDeviceGetMemoryInfo:
    total, used = 80 << 30, 3 << 30

    def __init__(self, device):
        pass

def nvmlDeviceGetHandleByUUID(uuid):
    return "", int(uuid[4:])

class nvmlDeviceGetUtilizationRates:
    def __init__(self, device):
        self.gpu = 25 + 50 * device[1]

def nvmlSystemGetDriverVersion():
    return "570.1"

def nvmlDeviceGetMaxMigDeviceCount(device):
    raise NVMLError("no parts")
"""


def nvidia_ml_py(folder: Path, monkeypatch: pytest.MonkeyPatch, *, count: int = 2, h100: int = 2) -> None:
    """Simulate the library on a machine with so many GPUs, the first ones H100, the others A100."""
    nvidia_smi(folder, monkeypatch, *(f"GPU-{index}" for index in range(count)))
    modules = folder / "modules"
    modules.mkdir(exist_ok=True)
    (modules / "pynvml.py").write_text(NVML.format(count=count, h100=h100))
    monkeypatch.syspath_prepend(modules)
    monkeypatch.setenv("PYTHONPATH", str(modules))


def own_devices() -> tuple[Any, ...]:
    world = tr.world()
    return world.peers[world.rank].devices


def on_gpus(**settings: Any) -> list[Any]:
    quiet: dict[str, Any] = {"on": "driver", "progress": False, "output": "none", "retries": 0, "ranks": 2, "gpus": 1}
    return tr.launch(own_devices, **{**quiet, **settings})


@pytest.mark.processes
def test_every_rank_knows_the_kind_of_every_gpu_and_so_does_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_ml_py(tmp_path, monkeypatch)
    wanted = [Device(str(k), "NVIDIA H100 80GB HBM3", 80 << 30, f"GPU-{k}", "570.1") for k in range(2)]
    run = tmp_path / "run"
    assert on_gpus(gpu_type=["A100", "h100"], run_dir=str(run)) == [(device,) for device in wanted]
    ranks = json.loads((run / "report.json").read_text())["ranks"]
    assert [rank["devices"] for rank in ranks] == [[asdict(device)] for device in wanted]


@pytest.mark.processes
def test_their_use_is_on_the_page_while_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_ml_py(tmp_path, monkeypatch)
    run_dir, go_on = tmp_path / "run", tmp_path / "go on"

    def wait() -> None:
        while not go_on.exists():
            time.sleep(0.01)

    quiet: dict[str, Any] = {"on": "driver", "progress": False, "output": "none", "retries": 0}
    with tr.submit(wait, ranks=2, gpus=1, run_dir=str(run_dir), **quiet) as run:
        deadline = time.monotonic() + 60
        ranks: list[dict[str, Any]] = []
        while len(ranks) < 2 or any(rank.get("gpu") is None for rank in ranks):
            assert time.monotonic() < deadline, ranks
            assert not run.done
            ranks = RunView(RunFolder(str(run_dir)), told).whole()["ranks"]
            time.sleep(0.05)
        assert [(rank["gpu"], rank["gpu_memory"]) for rank in ranks] == [(0.25, 3 << 30), (0.75, 3 << 30)]
        assert 'tritium_rank_gpu_utilization{run="' in prometheus.text(Runs([str(run_dir)], told))
        go_on.touch()
        run.result(60)


def test_of_a_part_only_the_memory_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_ml_py(tmp_path, monkeypatch)
    library = tmp_path / "modules" / "pynvml.py"
    library.write_text(library.read_text().replace("self.gpu = ", "raise NVMLError('a part')  # "))
    with closing(Listing(["0"])) as listing:
        listing.watch(["GPU-0", "GPU-1"])
        deadline = time.monotonic() + 60
        while not (used := listing.used()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert used == {"gpu_memory": 6 << 30}


@pytest.mark.processes
def test_another_kind_or_several_are_refused_before_the_function_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_ml_py(tmp_path, monkeypatch, h100=1)
    with pytest.raises(BadSetting, match=r"of 2 kinds \(1 NVIDIA H100.*; 1 NVIDIA A100.*'1' of task 1 .* mixed="):
        on_gpus()
    assert [devices[0].name for devices in on_gpus(mixed="allow")] == ["NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"]
    with pytest.raises(BadSetting, match=r"gpu_type=\['A10'\]: GPU '0' of task 0 .* is a NVIDIA H100.*and 1 more"):
        on_gpus(gpu_type="A10", mixed="allow")
    with pytest.raises(BadSetting, match=r"gpu_type=\['H100'\]: GPU '1' of task 1 on .* is a NVIDIA A100"):
        on_gpus(gpu_type="H100")


@pytest.mark.processes
def test_a_kind_that_can_not_be_read_is_not_taken_for_the_right_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_smi(tmp_path, monkeypatch, "GPU-a", "GPU-b", says="exit 9")
    assert on_gpus() == [(Device("0"),), (Device("1"),)]
    with pytest.raises(BadSetting, match=r"gpu_type=\['H100'\]: the kind of GPU '0' .* can't be read.*nvidia-ml-py"):
        on_gpus(gpu_type="H100")


@pytest.mark.processes
def test_without_the_library_nvidia_smi_tells_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi(tmp_path, monkeypatch, "GPU-a", "GPU-b")
    wanted = [(Device("0", "NVIDIA X", uuid="GPU-a"),), (Device("1", "NVIDIA X", uuid="GPU-b"),)]
    assert on_gpus(gpu_type="x") == wanted
    nvidia_ml_py(tmp_path, monkeypatch)
    broken = tmp_path / "modules" / "pynvml.py"
    broken.write_text(broken.read_text().replace("pass", "raise NVMLError('no driver')"))
    nvidia_smi(tmp_path, monkeypatch, "GPU-a", "GPU-b")
    assert on_gpus() == wanted, "the library is there, and its driver is not"


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
    with closing(Listing(["0", "GPU-b"])) as listing:
        assert [facts["name"] for facts in listing.assigned().values()] == ["NVIDIA X MIG 1g.5gb", "NVIDIA X"]
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
