"""The interface of engines: torch's implements it, and another engine needs nothing else."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn

import tritium as tr
from tritium.data.plan import plan as columns_plan
from tritium.data.schema import Data
from tritium.errors import BadSetting, ModelError
from tritium.model.calls import Computing
from tritium.model.engine import Engine, Maker, Parts, Weights
from tritium.model.engines import registry
from tritium.model.engines.torch import TorchEngine
from tritium.model.signature import Input, Output, Signature
from tritium.predict import kept, spark, worker

SIGNATURE = Signature((Input("x", ("a", "b", "c"), "float32", (3,)),), (Output("y", "float32", (2,)),))
X = np.arange(12, dtype="f4").reshape(4, 3)


class Bytes(Weights):
    def __init__(self, matrix: np.ndarray[Any, Any]) -> None:
        self.matrix = matrix

    def stream(self) -> Iterator[memoryview]:
        yield memoryview(self.matrix.tobytes())


class MatrixEngine(Engine):
    """A matrix by which the input is multiplied: it has only weights, and runs no code to load them."""

    name = "matrix"
    framework = None
    weights_file = "matrix.bin"
    code_file = None
    module_class = "numpy.ndarray"
    trusted = ("numpy",)

    def __init__(self, module: np.ndarray[Any, Any]) -> None:
        self.module = module

    def save(self, *, by_value: bool) -> Parts:
        return Parts(Bytes(self.module), b"", {"shape": list(self.module.shape)})

    @classmethod
    def restore(
        cls, weights: Any, facts: Mapping[str, Any], by: Maker | bytes, *, device: str | None = None
    ) -> MatrixEngine:
        assert by == b""
        return cls(np.frombuffer(weights, "f4").reshape(facts["shape"]))

    @contextmanager
    def on(self, device: str | None) -> Iterator[MatrixEngine]:
        yield self

    def call(
        self, batch: Mapping[str, np.ndarray[Any, Any]], outputs: Sequence[str]
    ) -> dict[str, np.ndarray[Any, Any]]:
        (x,) = batch.values()
        return dict.fromkeys(outputs, x @ self.module)

    @classmethod
    def check_device(cls, device: str) -> None:
        if device != "cpu":
            raise BadSetting(f"device={device!r}")

    @classmethod
    def task_device(cls, device: str, gpus: Sequence[str]) -> str:
        return device


@pytest.fixture
def matrix(monkeypatch: pytest.MonkeyPatch) -> np.ndarray[Any, Any]:
    """Register another engine, and return a model of it."""
    home = ModuleType("matrices")
    vars(home)["MatrixEngine"] = MatrixEngine
    monkeypatch.setitem(sys.modules, "matrices", home)
    monkeypatch.setitem(registry._ENGINES, "matrix", ("matrices", "MatrixEngine"))
    return np.arange(6, dtype="f4").reshape(3, 2)


def scored(model: tr.Model, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the worker's results for the rows of X, in two batches, without Spark."""
    schema = pa.schema([(name, pa.float32()) for name in "abc"])
    (field,) = columns_plan(schema, Data(None, columns={"x": ["a", "b", "c"]}), "train")
    context = SimpleNamespace(applicationId="app-1", broadcast=lambda pieces: SimpleNamespace(value=pieces))
    plan, sent = spark._parts(model, SimpleNamespace(sparkContext=context), streaming=False)
    plan |= {"fields": json.dumps([field.to_json()]), "as_bytes": [False], "batch_size": 3, "device": "cpu"}
    plan |= {"decode": pickle.dumps({}), "transform": None, "on_error": "fail", "computes": Computing()}
    monkeypatch.setattr(worker, "_task", lambda: (0, 1, []))
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(scratch))
    rows = pa.FixedSizeListArray.from_arrays(pa.array(X.reshape(-1)), 3).cast(pa.list_(pa.float32()))
    found = worker.score(pickle.dumps(plan), sent, iter([rows, rows[:1]]))
    return [row for array in found for row in array.to_pylist()]


def test_a_model_of_another_engine(
    matrix: np.ndarray[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tr.Model(matrix, SIGNATURE, engine="matrix")
    assert (model.predict(X) == X @ matrix).all()
    with pytest.raises(BadSetting, match="'warp'"):
        model.predict(X, device="warp")
    model.save(str(tmp_path / "model"))
    assert json.loads((tmp_path / "model" / "manifest.json").read_text())["engine"] == "matrix"
    loaded = tr.load(str(tmp_path / "model"))  # no code is run, so nothing must be trusted
    assert (loaded.predict(X) == X @ matrix).all()
    assert loaded.engine.name == "matrix"
    assert scored(model, tmp_path, monkeypatch) == [*(X @ matrix).tolist(), *(X[:1] @ matrix).tolist()]


def test_the_worker_scores_with_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tr.Model(nn.Linear(3, 2), SIGNATURE)
    expected = model.predict(X)
    assert isinstance(expected, np.ndarray)
    found = scored(model, tmp_path, monkeypatch)
    np.testing.assert_allclose(found, [*expected, expected[0]], rtol=1e-6)
    before = list(kept._last_used)
    assert scored(model, tmp_path, monkeypatch) == found
    assert list(kept._last_used) == before, "the model is kept from task to task"


WITHOUT_TORCH = """
import sys, types

sys.modules["torch"] = None
import numpy as np
import tritium as tr
import tritium.predict.local, tritium.predict.spark, tritium.predict.worker
from tritium.model.calls import Computing
from tritium.model.engine import Engine
from tritium.model.engines import registry
from tritium.model.signature import Input, Output, Signature

class Twice(Engine):
    save = restore = check_device = task_device = __exit__ = lambda *_: None
    __init__ = lambda self, module: None
    on = lambda self, device: self
    __enter__ = lambda self: self
    call = lambda self, batch, outputs: {"y": 2 * batch["x"]}

sys.modules["engines_of_ours"] = types.SimpleNamespace(Twice=Twice)
registry._ENGINES["twice"] = ("engines_of_ours", "Twice")
signature = Signature((Input("x", ("x",)),), (Output("y"),))
print(tr.Model(None, signature, engine="twice").predict(np.arange(3.0)).tolist())
"""


def test_another_engine_needs_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[0.0, 2.0, 4.0]", done.stderr


def test_a_manifest_names_the_engine_and_one_from_before_is_torchs(tmp_path: Path) -> None:
    model = tr.Model(nn.Linear(3, 2), SIGNATURE)
    model.save(str(tmp_path / "model"))
    place = tmp_path / "model" / "manifest.json"
    manifest = json.loads(place.read_text())
    assert manifest.pop("engine") == "torch"
    place.write_text(json.dumps(manifest))
    loaded = tr.load(str(tmp_path / "model"), trusted=True)
    assert (loaded.predict(X) == model.predict(X)).all()  # type: ignore[union-attr]
    for name in ("warp", "torch_module", None, ["torch"], 3):
        place.write_text(json.dumps({**manifest, "engine": name}))
        with pytest.raises(ModelError, match=r"knows [\w, ]*torch[\w, ]*\. Was it saved by a later version"):
            tr.load(str(tmp_path / "model"), trusted=True)
    with pytest.raises(ModelError, match=r"engine 'warp'"):
        tr.Model(nn.Linear(3, 2), SIGNATURE, engine="warp")


def test_a_module_that_writes_over_its_input_leaves_the_rows_alone() -> None:
    x = X - 5
    x.flags.writeable = False  # as Arrow's memory is
    before = x.copy()
    with TorchEngine(nn.ReLU(inplace=True)).on(None) as engine:
        assert (engine.call({"x": x}, ["y"])["y"] == before.clip(0)).all()
    assert (x == before).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64])
def test_outputs_are_arrays_in_the_dtype_of_the_model(dtype: torch.dtype) -> None:
    class Cast(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.to(dtype)

    with TorchEngine(Cast()).on("cpu") as engine:
        found = engine.call({"x": X}, ["y"])["y"]
    half = dtype in (torch.bfloat16, torch.float16)
    assert str(found.dtype) == ("float32" if half else str(dtype).removeprefix("torch."))
    assert (found == X).all()


def test_a_model_restored_for_a_device_is_ready_to_be_called() -> None:
    module = nn.Sequential(nn.Dropout(0.9), nn.Linear(3, 2)).train()
    parts = TorchEngine(module).save(by_value=True)
    assert parts.code is not None
    weights = bytearray(b"".join(parts.weights.stream()))
    engine = TorchEngine.restore(weights, parts.facts, parts.code, device="cpu")
    assert not any(layer.training for layer in engine.module.modules())
    assert not any(parameter.requires_grad for parameter in engine.module.parameters())
    assert (engine.call({"x": X}, ["y"])["y"] == tr.Model(module, SIGNATURE).predict(X)).all()
    assert all(layer.training for layer in module.modules())


@pytest.mark.parametrize("activation", ["softmax", "sigmoid", "none"])
def test_probabilities_are_those_of_torch_in_float64(activation: Any) -> None:
    scores = np.random.default_rng(0).normal(scale=20, size=(500, 7)).astype("f4")
    scores[0], scores[1], scores[2] = 0, 1000, -1000
    signature = Signature(
        (Input("x", ("x",), "float32", (7,)),), (Output("y", shape=(7,)),), "classification", activation
    )
    found = tr.Model(nn.Identity(), signature).predict(scores)
    assert isinstance(found, dict)
    wide = torch.tensor(scores).double()
    expected = {"softmax": wide.softmax(1), "sigmoid": wide.sigmoid(), "none": wide}[activation]
    np.testing.assert_allclose(found["probability"], expected.numpy(), rtol=1e-13, atol=1e-300)
    assert (found["prediction"] == expected.argmax(1).numpy()).all()
