"""Every estimator trains on a GPU, and its model predicts there."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tritium as tr
from cases import case_of
from estimators.test_contract import rows
from gpu.gpus import MARKS, ON_GPU
from tritium.errors import RankFailed
from tritium.ml import Callback, TorchEstimator

pytestmark = [*MARKS, pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")]
SETTINGS: dict[str, Any] = {"feature_cols": ["a", "b"], "verbose": False}


def deep(**settings: Any) -> TorchEstimator:
    """Return an estimator of a small MLP, with all that has a state on the GPU: BatchNorm, dropout, Adam."""
    import torch
    from torch import nn

    def model() -> nn.Module:
        layers = [nn.Linear(2, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1)]
        return nn.Sequential(*layers)

    own = {"model": model, "loss": nn.MSELoss(), "optimizer": lambda p: torch.optim.Adam(p, 0.01), "label_cols": ["y"]}
    return TorchEstimator(**{**own, **SETTINGS, "epochs": 6, "global_batch_size": 40, **settings})


def from_zeros() -> Any:
    import keras

    return keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1, kernel_initializer="zeros")])


class Where(Callback):
    """Write on which devices the parameters are at the end of an epoch, while they are trained."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def on_epoch_end(self, state: Any) -> None:
        found = {str(parameter.device) for parameter in state.module.parameters()}
        self.place.write_text(" ".join(sorted(found)))


class KillsOnce(Callback):
    """Kill the rank after its fourth epoch, once."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def on_epoch_end(self, state: Any) -> None:
        if state.epoch == 4 and not self.place.exists():
            self.place.touch()
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("name", ["torch", "keras", "lightning"])
def test_a_gpu_learns_what_a_cpu_learns(name: str) -> None:
    case = case_of("estimators", name)
    frame = rows()
    own = {"model": from_zeros} if name == "keras" else {}  # Keras draws other weights on a GPU
    on_cpu = case.estimator(**{**ON_GPU, "gpus": 0}, **SETTINGS, **own).fit(frame)
    on_gpu = case.estimator(**ON_GPU, **SETTINGS, **own).fit(frame)
    np.testing.assert_allclose(on_gpu.predict(frame), on_cpu.predict(frame), rtol=1e-4, atol=1e-5)
    on_gpu.setParams(device="cuda")
    np.testing.assert_allclose(on_gpu.predict(frame), on_cpu.predict(frame), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"precision": "bf16"},
        {"precision": "fp16"},
        {"compile": True},
        {"strategy": "fsdp"},
        {"gradient_accumulation": 2},
        {"check": "off"},
    ],
    ids=str,
)
def test_it_trains_on_the_gpu(settings: dict[str, Any], tmp_path: Path) -> None:
    frame, place = rows(), tmp_path / "where"
    model = deep(**ON_GPU, **{"epochs": 60, **settings}, callbacks=[Where(place)]).fit(frame)
    assert place.read_text() == "cuda:0"
    assert np.mean((model.predict(frame) - frame.y) ** 2) < 0.1 * frame.y.var()
    assert all(parameter.device.type == "cpu" for parameter in model.module().parameters())


@pytest.mark.parametrize("settings", [{}, {"precision": "fp16"}], ids=str)
def test_a_killed_rank_continues_as_if_nothing_had_been(settings: dict[str, Any], tmp_path: Path) -> None:
    frame, place = rows(), tmp_path / "killed"
    settings = {**ON_GPU, **settings, "checkpoint_every": 1}
    through = deep(**settings).fit(frame)
    retried = {**settings, "retries": 1, "run_dir": str(tmp_path / "run")}
    again = deep(**retried, callbacks=[KillsOnce(place)]).fit(frame)
    assert place.exists()
    np.testing.assert_allclose(again.predict(frame), through.predict(frame), rtol=1e-5, atol=1e-6)
    assert [epoch["loss"] for epoch in again.history] == pytest.approx([epoch["loss"] for epoch in through.history])


def test_out_of_memory_is_the_rank_s_own_error() -> None:
    def train() -> None:
        import torch

        free, _ = torch.cuda.mem_get_info()
        torch.empty(free + (1 << 30), dtype=torch.uint8, device=tr.world().device)

    with pytest.raises(RankFailed, match=r"OutOfMemoryError: CUDA out of memory\. Tried to allocate") as caught:
        tr.launch(train, framework="torch", **ON_GPU)
    assert not isinstance(caught.value.__cause__, tr.errors.TritiumError)


def test_an_assertion_on_the_device_is_the_rank_s_own_error_and_the_next_launch_works() -> None:
    def train(index: int) -> float:
        import torch

        device = tr.world().device
        table = torch.nn.Embedding(10, 2, device=device)
        return float(table(torch.tensor([index], device=device)).sum())

    with pytest.raises(RankFailed, match="device-side assert"):
        tr.launch(train, args=(11,), framework="torch", **ON_GPU)
    assert isinstance(tr.launch(train, args=(3,), framework="torch", **ON_GPU)[0], float)


def test_the_memory_of_a_killed_rank_is_free_for_the_next(tmp_path: Path) -> None:
    place = tmp_path / "killed"

    def train() -> int:
        import torch

        _, total = torch.cuda.mem_get_info()
        held = torch.empty(int(total * 0.6), dtype=torch.uint8, device=tr.world().device)
        if not place.exists():
            place.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return int(held.numel())

    assert tr.launch(train, framework="torch", **{**ON_GPU, "retries": 1})[0] > 0


def test_more_ranks_than_gpus_are_refused_with_the_numbers() -> None:
    import torch

    count = torch.cuda.device_count()
    with pytest.raises(tr.errors.NotEnoughSlots, match=rf"{count + 1} GPU\(s\); this machine shows {count}"):
        tr.launch(lambda: None, **{**ON_GPU, "ranks": count + 1})
