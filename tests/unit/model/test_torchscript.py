"""TorchScript as a model: saved, restored and sent as any module, its code as a file of torch's own."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import tritium as tr
from tritium import ship
from tritium.errors import BadSetting, UntrustedModel
from tritium.ml import TorchEstimator
from tritium.model.engines.torch import TorchEngine

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
ROWS = pd.DataFrame({"a": [0.5, 1.0, 2.0], "b": [0.0, 1.0, 2.0], "c": [1.0, 1.0, 5.0]})
X = torch.tensor(ROWS.to_numpy(np.float32))


class Net(nn.Module):
    """A module with parameters, buffers, layers that depend on the mode, and control flow, which a trace would lose."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(3, 64), nn.BatchNorm1d(64), nn.Dropout(0.5)
        self.register_buffer("scale", torch.full((64,), 2.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.drop(self.norm(self.first(x))) * self.scale
        return found.sum(1) if bool(x.sum() > 0) else found.mean(1)


def made(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "traced":
        net = nn.Sequential(nn.Linear(3, 64), nn.Linear(64, 1))
        return torch.jit.trace(net, X)
    script = torch.jit.script(Net())
    if kind == "frozen":
        return torch.jit.freeze(script.eval())
    return nn.Sequential(script, nn.Identity()) if kind == "a layer" else script


@pytest.fixture(params=["scripted", "traced", "frozen", "a layer"])
def module(request: pytest.FixtureRequest) -> nn.Module:
    return made(request.param)


@pytest.mark.usefixtures("saved_elsewhere")
def test_it_is_saved_and_loaded(module: nn.Module, tmp_path: Path) -> None:
    model = tr.Model(module, example=ROWS)
    found = model.predict(ROWS)
    with torch.no_grad():
        np.testing.assert_allclose(found, module.eval()(X).reshape(-1).double(), rtol=1e-6)
    model.save(str(tmp_path / "m"))
    with pytest.raises(UntrustedModel):
        tr.load(str(tmp_path / "m"))
    loaded = tr.load(str(tmp_path / "m"), trusted=True)
    loaded.save(str(tmp_path / "again"))
    trained = [weight.requires_grad for weight in module.parameters()]
    for other in (loaded, tr.load(str(tmp_path / "again"), trusted=True), pickle.loads(ship.pickle(model))):
        np.testing.assert_allclose(other.predict(ROWS), found, rtol=1e-5)  # TorchScript compiles after the first calls
        assert [weight.requires_grad for weight in other.module.parameters()] == trained


def test_it_is_sent_to_executors_with_the_current_weights(module: nn.Module) -> None:
    """The same bytes for the same module, by which a worker knows it again; the weights are a file beside them."""
    model = tr.Model(module, example=ROWS)
    weights = list(module.parameters())
    for weight in weights:
        weight.data.add_(0.25)
    parts, again = model.engine.save(by_value=True), model.engine.save(by_value=True)
    assert parts.code is not None
    assert parts.code == again.code
    buffer = bytearray(b"".join(parts.weights.stream()))
    restored = TorchEngine.restore(buffer, parts.facts, parts.code, device="cpu")
    (output,) = restored.call({"features": X.numpy()}, ["prediction"]).values()
    np.testing.assert_allclose(output.reshape(-1), model.predict(ROWS), rtol=1e-5)


def test_its_weights_are_saved_once() -> None:
    torch.manual_seed(0)
    parts = tr.Model(torch.jit.script(nn.Linear(3, 10_000)), example=ROWS).engine.save(by_value=True)
    assert len(parts.code or b"") < 20_000
    assert sum(len(piece) for piece in parts.weights.stream()) > 160_000


def test_the_arguments_of_its_forward_are_known() -> None:
    class Two(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor, times: int = 2) -> torch.Tensor:
            return (x.sum(1) + y) * times

    batch = {"x": X, "y": np.ones(3, np.float32), "label": np.zeros(3)}
    model = tr.Model(torch.jit.script(Two()), example=batch)
    assert [taken.name for taken in model.signature.inputs] == ["x", "y"]
    assert list(model.predict({"x": X, "y": np.ones(3, np.float32)})) == [5.0, 8.0, 20.0]


def test_a_function_of_torchscript_travels() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    assert pickle.loads(ship.pickle({"function": torch.jit.script(double)}))["function"](X).equal(X * 2)


@pytest.mark.parametrize("kind", ["scripted", "a layer"])
def test_an_estimator_does_not_train_it(kind: str) -> None:
    settings: dict[str, Any] = {"on": "here", "feature_cols": ["a", "b", "c"], "label_cols": ["a"]}
    estimator = TorchEstimator(model=lambda: made(kind), loss=nn.MSELoss(), optimizer=torch.optim.Adam, **settings)
    with pytest.raises(BadSetting, match=r"torch\.jit\.ScriptModule.*tr\.Model\(torch\.jit\.script\("):
        estimator.fit(ROWS)
