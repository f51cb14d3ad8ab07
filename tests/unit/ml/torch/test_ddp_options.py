"""`ddp_options`: what is refused, compressed gradients, and a hook's state in a training that continues."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn

from tritium.errors import BadSetting
from tritium.ml import Callback, TrainState, fit
from tritium.ml.torch.ddp import ddp_keywords, with_sync_batch_norm
from tritium.ml.torch.ranks import Ranks
from tritium.ml.torch.setting_checks import DDP_OPTIONS

ROWS = 48
HERE: dict[str, Any] = {"on": "here", "progress": False, "output": "none", "verbose": False}
DRIVER: dict[str, Any] = {**HERE, "on": "driver", "ranks": 2}


def table() -> pa.Table:
    x = np.random.default_rng(2).normal(size=(ROWS, 3))
    return pa.table({f"x{i}": x[:, i] for i in range(3)} | {"y": x[:, 0] - x[:, 1], "k": np.arange(ROWS) % 3})


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


GOOD: dict[str, Any] = {
    "model": net,
    "loss": nn.MSELoss(),
    "optimizer": lambda p: torch.optim.SGD(p, 0.05, momentum=0.5),
    "feature_cols": ["x0", "x1", "x2"],
    "label_cols": ["y"],
    "batch_size": 4,
    "epochs": 2,
}


def nothing(bucket: Any) -> Any:
    raise AssertionError(bucket)


class PowerSGDState:
    """Named as torch's, whose own can't be unpickled in a rank."""


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("static_graph", "must be a mapping from options to values"),
        ({"bucket_cap": 25}, r"ddp_options has no 'bucket_cap'\. Did you mean 'bucket_cap_mb'"),
        ({"bucket_cap_mb": "25"}, "'] is '25', and must be a number of megabytes above 0"),
        ({"bucket_cap_mb": 0}, "'] is 0, and must be"),
        ({"bucket_cap_mb": True}, "'] is True, and must be"),
        ({"static_graph": 1}, "'] is 1, and must be True or False"),
        ({"sync_batch_norm": None}, "'] is None, and must be True or False"),
        ({"static_graph": True, "find_unused_parameters": True}, "leave out find_unused_parameters"),
        ({"comm_hook": "fp_16"}, r"is 'fp_16', which is unknown\. Did you mean 'fp16'"),
        ({"comm_hook": 16}, "is 16, and no function. Choose one of 'fp16', 'bf16', 'power_sgd'"),
        ({"comm_hook": (1, 2, 3)}, "has 3 parts"),
        ({"comm_hook": nothing}, r"nothing, takes bucket; it is called with \(state, bucket\)"),
        ({"comm_hook": (PowerSGDState(), lambda state, bucket: None)}, "which only a rank can make"),
    ],
)
def test_what_is_wrong(given: Any, message: str) -> None:
    with pytest.raises(BadSetting, match=message):
        fit(table(), **GOOD | HERE, ddp_options=given)


def test_batch_norm_over_all_ranks_is_refused_on_cpus_before_anything_starts() -> None:
    settings = {"model": normed, "ddp_options": {"sync_batch_norm": True}}
    with pytest.raises(BadSetting, match=r"needs ranks on GPUs, as torch\.nn\.SyncBatchNorm can't compute on a CPU"):
        fit(table(), **GOOD | DRIVER | settings)
    with pytest.raises(BadSetting, match="needs ranks on GPUs"):
        fit(table(), **GOOD | DRIVER | settings | {"ranks": (1, 2)})
    alone = fit(table(), **GOOD | HERE | settings)
    assert type(alone.module[1]) is nn.BatchNorm1d
    plain = fit(table(), **GOOD | HERE | {"model": normed})
    assert alone.history[-1]["loss"] == plain.history[-1]["loss"]


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        ({"gpus": 0.5}, r"gpus=0\.5: ranks that share a GPU .* NCCL refuses two on one\. Ask for gpus=1, or ranks=1"),
        (
            {"gpus": 1, "accelerator": "npu", "on": "cluster"},
            "accelerator='npu': this estimator trains on GPUs or CPUs",
        ),
    ],
)
def test_devices_on_which_gradients_can_not_be_exchanged(devices: dict[str, Any], said: str) -> None:
    with pytest.raises(BadSetting, match=said):
        fit(table(), **GOOD | DRIVER | devices)


def test_batch_norm_over_all_ranks_keeps_names_and_parameters() -> None:
    module, options = normed(), {"sync_batch_norm": True}
    before = dict(module.named_parameters())
    names = list(module.state_dict())
    converted = with_sync_batch_norm(module, options, Ranks(0, 2, torch.device("cuda")))
    assert type(converted[1]) is nn.SyncBatchNorm  # type: ignore[index]
    assert list(converted.state_dict()) == names
    assert all(parameter is before[name] for name, parameter in converted.named_parameters())
    with pytest.raises(BadSetting, match="needs ranks on GPUs"):
        with_sync_batch_norm(normed(), options, Ranks(0, 2, torch.device("cpu")))
    assert with_sync_batch_norm(module, None, Ranks(0, 2, torch.device("cpu"))) is module


def test_a_promise_that_the_dry_run_sees_broken() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.other = nn.Linear(3, 1), nn.Linear(3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(x)

    with pytest.raises(BadSetting, match=r"'other\.weight' gets no gradient \(2 tensors in all\)"):
        fit(table(), **GOOD | HERE | {"model": Unused}, ddp_options={"find_unused_parameters": False})


def test_sparse_gradients_and_a_hook() -> None:
    model = lambda: nn.Sequential(nn.Embedding(3, 4, sparse=True), nn.Linear(4, 1))  # noqa: E731
    settings = GOOD | HERE | {"model": model, "feature_cols": "k", "optimizer": lambda p: torch.optim.SGD(p, 0.1)}
    with pytest.raises(BadSetting, match=r"'0\.weight' has sparse gradients, which no comm_hook exchanges"):
        fit(table(), **settings, ddp_options={"comm_hook": "fp16"})


def test_what_ddp_is_given() -> None:
    assert ddp_keywords(None, find_unused_parameters=True) == {
        "gradient_as_bucket_view": True,
        "find_unused_parameters": True,
    }
    given = {"static_graph": True, "comm_hook": "fp16", "sync_batch_norm": True, "gradient_as_bucket_view": False}
    assert ddp_keywords(given, find_unused_parameters=True) == {
        "gradient_as_bucket_view": False,
        "find_unused_parameters": False,
        "static_graph": True,
    }
    assert {"bucket_cap_mb", "comm_hook"} < set(DDP_OPTIONS)


class Killed(Callback):
    """A callback that kills rank 1 at a step, once."""

    def __init__(self, place: Path, step: int) -> None:
        self.place, self.step = str(place), step

    def on_step_end(self, state: TrainState) -> None:
        if state.step == self.step and state.rank == 1:
            with contextlib.suppress(FileExistsError):
                os.close(os.open(f"{self.place}/killed", os.O_CREAT | os.O_EXCL))
                os.kill(os.getpid(), signal.SIGKILL)


def weights(model: Any) -> bytes:
    return b"".join(value.numpy().tobytes() for value in model.module.state_dict().values())


def power_sgd() -> Any:
    """Return PowerSGD of rank 1 from the third step on, for matrices of any size."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    def state() -> Any:
        return powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2, min_compression_rate=1)

    return state, powerSGD_hook.powerSGD_hook


@pytest.mark.processes
def test_the_state_of_a_hook_continues_after_a_loss(tmp_path: Path) -> None:
    settings = GOOD | DRIVER | {"ddp_options": {"comm_hook": power_sgd()}, "checkpoint_every": 1, "retries": 1}
    whole = fit(table(), **settings)
    again = fit(table(), **settings, callbacks=[Killed(tmp_path, 8)], run_dir=str(tmp_path / "run"))
    assert (tmp_path / "killed").exists()
    assert weights(again) == weights(whole)
    assert [e["loss"] for e in again.history] == [e["loss"] for e in whole.history]
    exact = fit(table(), **settings | {"ddp_options": None})
    assert weights(exact) != weights(whole), "nothing was compressed, so this test shows nothing"
    with pytest.raises(BadSetting, match="ddp_options comm_hook: None, was 'powerSGD_hook'"):
        fit(table(), **settings | {"ddp_options": None, "epochs": 3}, run_dir=str(tmp_path / "run"))


@pytest.mark.processes
@pytest.mark.parametrize("name", ["fp16", "bf16", "power_sgd"])
def test_gradients_in_fewer_bits(name: str) -> None:
    options = {"comm_hook": name, "find_unused_parameters": False, "bucket_cap_mb": 0.001}
    exact = fit(table(), **GOOD | DRIVER)
    found = fit(table(), **GOOD | DRIVER, ddp_options=options)
    losses = [e["loss"] for e in found.history]
    assert losses == pytest.approx([e["loss"] for e in exact.history], rel=0.02)
    if name == "power_sgd":  # which begins after 1,000 steps
        assert losses == pytest.approx([e["loss"] for e in exact.history], rel=1e-6)
    else:
        assert weights(found) != weights(exact), "nothing was compressed, so this test shows nothing"
    assert [type(layer) for layer in found.module] == [type(layer) for layer in net()]
