"""A model without Spark: its signature, its predictions, its directory."""

from __future__ import annotations

import copy
import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cloudpickle
import fsspec
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import tritium as tr
from tritium.data.plan import plan
from tritium.data.schema import Data
from tritium.errors import BadRow, BadSetting, ModelError, SignatureMismatch, UntrustedModel
from tritium.model import files
from tritium.model.engines import torch_weights as weights
from tritium.model.engines.torch_copies import Copies
from tritium.model.signature import Input, Output, Signature
from tritium.predict.worker import result_type, to_arrow

FEATURES = Input("features", ("a", "b", "c"), "float32", (3,))


def regression(module: nn.Module | None = None, **settings: Any) -> tr.Model:
    signature = Signature((FEATURES,), (Output("y", "float32", (1,)),), "regression")
    return tr.Model(module or nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)), signature, **settings)


def frame(rows: int = 20) -> pd.DataFrame:
    draw = np.random.default_rng(0)
    return pd.DataFrame(
        {"a": draw.normal(size=rows), "b": draw.normal(size=rows).astype("f4"), "c": np.arange(rows), "other": "x"}
    )


def matrix(table: pd.DataFrame) -> np.ndarray[Any, Any]:
    return table[["a", "b", "c"]].to_numpy(np.float32)


def fresh(code: str, *arguments: str) -> str:
    """Return what this code prints in a fresh Python process that has no pyspark and no Tritium session."""
    blocked = "import sys; sys.modules['pyspark'] = None\n"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", blocked + textwrap.dedent(code), *arguments],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.processes
def test_a_worker_collects_garbage_after_a_task_without_looking_at_torchs_objects() -> None:
    """Spark's daemon calls gc.collect() between two tasks: 0.25 s with all that torch makes."""
    out = fresh("""
        import gc
        from tritium.frameworks import find
        from tritium.predict.kept import _import

        _import(find("torch"))
        print(gc.get_freeze_count(), len(gc.get_objects()))
    """)
    frozen, seen = map(int, out.split())
    assert frozen > 50 * seen, "the collector sees what torch made"


def test_the_package_imports_without_torch() -> None:
    out = fresh("import tritium.model.model, tritium.model.signature; print('torch' in sys.modules)")
    assert out.strip() == "False"


# --- the signature


def test_a_signature_survives_json() -> None:
    codec = plan(pa.schema([("s", pa.string())]), Data(None, vocabulary={"s": ["x", "y"]}), "train")[0]
    signature = Signature(
        (FEATURES, Input.of(codec, pa.schema([("s", pa.string())]))), (Output("y", shape=(2,)),), "classification"
    )
    assert signature.activation == "softmax"
    again = Signature.from_json(json.loads(json.dumps(signature.to_json())))
    assert again.to_json() == signature.to_json()
    assert again.columns == ("a", "b", "c", "s")
    assert again.inputs[1].types == ("string",)


@pytest.mark.parametrize(
    ("inputs", "outputs", "task", "words"),
    [
        ((), (Output("y"),), None, "at least one input"),
        ((FEATURES, FEATURES), (Output("y"),), None, "different names"),
        ((FEATURES,), (Output("y"), Output("z")), "classification", "one output"),
        ((FEATURES,), (Output("y", shape=(2, 3)),), "classification", r"\[batch, 2, 3\]"),
        ((FEATURES,), (Output("y"),), "ranking", "ranking"),
    ],
)
def test_a_wrong_signature(inputs: Any, outputs: Any, task: Any, words: str) -> None:
    with pytest.raises(BadSetting, match=words):
        Signature(inputs, outputs, task)


# --- predictions


@pytest.mark.parametrize("batch_size", [1, 7, 20, 1024])
def test_every_kind_of_table_gives_the_same(batch_size: int) -> None:
    model, table = regression(), frame()
    x = matrix(table)
    with torch.no_grad():
        expected = model.module(torch.tensor(x))[:, 0].double().numpy()
    kinds = [table, pa.Table.from_pandas(table), x, x.astype("f8"), torch.tensor(x), {"features": x}]
    kinds.append(pa.RecordBatch.from_pandas(table))
    for data in kinds:
        found = model.predict(data, batch_size=batch_size)
        assert isinstance(found, np.ndarray)
        assert found.dtype == np.float64
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert model.predict(table.iloc[:0]).shape == (0,)


def test_the_module_is_in_eval_mode_only_while_it_predicts() -> None:
    module = nn.Sequential(nn.Dropout(0.9), nn.Linear(3, 1), nn.ReLU(inplace=True))
    module.train()
    module[0].eval()
    module[0].train()
    model, x = regression(module), matrix(frame())
    before = x.copy()
    assert (model.predict(x) == model.predict(x)).all()
    assert all(m.training for m in module.modules())
    assert (x == before).all()


@pytest.mark.parametrize(
    ("outputs", "task", "empty"),
    [
        ((Output("y", "float32", (1,)),), "regression", {"prediction": ((0,), "float64")}),
        ((Output("y", "bfloat16", (4,)),), "regression", {"prediction": ((0, 4), "float32")}),
        ((Output("y", "int64", (2, 0, 3)),), None, {"prediction": ((0, 2, 0, 3), "int64")}),
        ((Output("y", "float32", (None, 3)),), None, {"prediction": ((0, 0, 3), "float32")}),
        (
            (Output("y", "float32", (5,)),),
            "classification",
            {"prediction": ((0,), "float64"), "probability": ((0, 5), "float64")},
        ),
        (
            (Output("y", "float32", ()),),
            "classification",
            {"prediction": ((0,), "float64"), "probability": ((0, 2), "float64")},
        ),
        (
            (Output("y", "float32", ()), Output("z", "bool", (3,))),
            None,
            {"y": ((0,), "float64"), "z": ((0, 3), "bool")},
        ),
    ],
)
def test_no_rows_give_empty_arrays_without_the_module(outputs: Any, task: Any, empty: dict[str, Any]) -> None:
    class Flat(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.view(len(x), -1)

    signature = Signature((FEATURES,), outputs, task)
    found = tr.Model(Flat(), signature).predict(frame().iloc[:0])
    named = found if isinstance(found, dict) else {"prediction": found}
    assert {name: (array.shape, str(array.dtype)) for name, array in named.items()} == empty
    sent = to_arrow(signature, named)  # what Spark's worker gives for a batch without rows
    assert len(sent) == 0
    assert sent.type == result_type(signature)


def test_a_pandas_column_of_objects_has_no_type_without_rows() -> None:
    inputs = Input("v", ("v",), "float32", (3,)), Input("n", ("n",), "float32", types=("number",))
    signature = Signature(inputs, (Output("y"),))
    model = tr.Model(nn.Identity(), signature)
    rows = pd.DataFrame({"v": [[1.0, 2.0, 3.0]], "n": [1.0], "s": ["x"]})
    assert model.predict(rows.iloc[:0]).shape == (0,)  # type: ignore[union-attr]
    with pytest.raises(SignatureMismatch, match=r"1 difference:\n  - missing column 'v'"):
        model.predict(rows[["n", "s"]].iloc[:0])
    with pytest.raises(SignatureMismatch, match=r"1 difference:\n  - column 'n' is timestamp"):
        model.predict(rows.iloc[:0].astype({"n": "datetime64[us]"}))
    with pytest.raises(BadRow, match=r"column 'v' is null in row 0"):
        model.predict(rows.assign(v=None))


def test_threads_that_predict_do_not_put_each_other_in_train_mode() -> None:
    """The first is done while the second computes, with another model that shares a layer."""
    layer = nn.Sequential(nn.Dropout(0.9), nn.Linear(3, 1))

    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = layer
            self.inside, self.resume = threading.Event(), threading.Event()

        def forward(self, x: torch.Tensor) -> Any:
            self.inside.set()
            assert self.resume.wait(60)
            return self.net(x)

    modules, x = [Slow(), Slow()], matrix(frame())
    right = regression(layer.eval()).predict(x)
    layer.train()
    with ThreadPoolExecutor(2) as pool:
        running = []
        for module in modules:
            running.append(pool.submit(regression(module).predict, x))
            assert module.inside.wait(60)
        for module, found in zip(modules, running, strict=True):
            module.resume.set()
            assert (found.result(60) == right).all()
    assert all(m.training for module in modules for m in module.modules()), "as they were"


def test_a_module_that_fails_is_left_in_its_mode() -> None:
    class Broken(nn.Linear):
        def train(self, mode: bool = True) -> Broken:
            super().train(mode)
            if not mode:
                raise RuntimeError("no eval mode")
            return self

    model = regression(Broken(3, 1))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no eval mode"):
            model.predict(matrix(frame()))
        assert model.module.training


def test_classes_and_their_probabilities() -> None:
    x = matrix(frame())
    module = nn.Linear(3, 4)
    signature = Signature((FEATURES,), (Output("scores", shape=(4,)),), "classification")
    found = tr.Model(module, signature).predict(x)
    expected = module(torch.tensor(x)).double().softmax(1).detach().numpy()
    assert isinstance(found, dict)
    np.testing.assert_allclose(found["probability"], expected, rtol=1e-6)
    assert (found["prediction"] == expected.argmax(1)).all()
    assert found["prediction"].dtype == np.float64


@pytest.mark.parametrize("activation", [None, "none"])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_two_classes_by_one_score(activation: Any, shape: tuple[int, ...]) -> None:
    layers: list[nn.Module] = [nn.Linear(3, 1)] + [nn.Sigmoid()] * (activation == "none")
    module = nn.Sequential(*layers, *([nn.Flatten(0)] * (shape == ())))
    signature = Signature((FEATURES,), (Output("score", shape=shape),), "classification", activation)
    x = matrix(frame())
    found = tr.Model(module, signature).predict(x)
    assert isinstance(found, dict)
    expected = torch.sigmoid(layers[0](torch.tensor(x))).detach().numpy()[:, 0]
    np.testing.assert_allclose(found["probability"][:, 1], expected, rtol=1e-5)
    np.testing.assert_allclose(found["probability"].sum(1), 1)
    assert (found["prediction"] == (expected > 0.5)).all()


class Several(nn.Module):
    def __init__(self, form: type) -> None:
        super().__init__()
        self.words = nn.Embedding(3, 2)
        self.form = form

    def forward(self, word: torch.Tensor, features: torch.Tensor) -> Any:
        total, vector = features.sum(1), self.words(word)
        return {"vector": vector, "total": total} if self.form is dict else self.form([total, vector])


@pytest.mark.parametrize("form", [dict, tuple, list])
def test_several_inputs_and_outputs(form: type) -> None:
    inputs = (FEATURES, Input("word", ("w",), "int64", (), codec={}))
    outputs = (Output("total"), Output("vector", shape=(2,)))
    model = tr.Model(Several(form), Signature(inputs, outputs))
    table = frame().assign(w=np.arange(20) % 3)
    found = model.predict(table, batch_size=6)
    assert isinstance(found, dict)
    np.testing.assert_allclose(found["total"], matrix(table).sum(1), rtol=1e-5)
    assert found["vector"].shape == (20, 2)
    again = model.predict({"features": matrix(table), "word": table.w.to_numpy()})
    assert isinstance(again, dict)
    np.testing.assert_allclose(again["vector"], found["vector"])


def test_a_module_that_returns_something_else() -> None:
    with pytest.raises(ModelError, match=r"\[batch, 1\] with a batch of 20.*\[20, 2\]"):
        regression(nn.Linear(3, 2)).predict(matrix(frame()))
    with pytest.raises(ModelError, match=r"tensors \['total', 'vector'\].*1 value"):
        tr.Model(nn.Linear(3, 1), Signature((FEATURES,), (Output("total"), Output("vector")))).predict(matrix(frame()))


def test_words_become_the_numbers_that_they_were_at_training() -> None:
    schema = pa.schema([("w", pa.string())])
    (field,) = plan(schema, Data(None, vocabulary={"w": ["red", "green"]}, nulls={"w": "green"}), "train")
    signature = Signature((Input.of(field, schema),), (Output("v", shape=(2,)),))
    module = nn.Embedding(2, 2)
    found = tr.Model(module, signature).predict(pa.table({"w": ["green", "red", None]}))
    expected = module.weight.detach().numpy()[[1, 0, 1]]
    np.testing.assert_allclose(found, expected)
    with pytest.raises(BadRow, match=r"'blue'"):
        tr.Model(module, signature).predict(pa.table({"w": ["blue"]}))


def test_every_difference_is_listed() -> None:
    inputs = (FEATURES, Input("word", ("w",), "int64", ()), Input("image", ("i",), "float32", (2, 2)))
    model = tr.Model(nn.Identity(), Signature(inputs, (Output("y"),)))
    table = pa.table({"a": ["1"], "B": [1.0], "c": [[1.0]], "w": [1.5], "i": [[1.0]]})
    with pytest.raises(SignatureMismatch) as caught:
        model.predict(table)
    text = str(caught.value)
    assert len(caught.value.differences) == 5
    for words in (
        "column 'a' is string, and the model takes a number (float32)",
        "missing column 'b' (input 'features'). Did you mean 'B'?",
        "column 'c' is list<item: double>, and the model takes one value a row",
        "column 'w' is double, and the model takes int64",
        "column 'i' is list<item: double>, and the model takes an array of arrays a row",
    ):
        assert words in text


def test_a_date_is_no_timestamp() -> None:
    schema = pa.schema([("d", pa.date32())])
    (field,) = plan(schema, Data(None, columns={"d": ["d"]}, dtype="float32"), "train")
    model = tr.Model(nn.Linear(1, 1), Signature((Input.of(field, schema),), (Output("y"),)))
    assert model.predict(pa.table({"d": pa.array([1, 2], pa.date32())})).shape == (2,)
    with pytest.raises(SignatureMismatch, match=r"'d' is timestamp\[us\], and the model takes a date"):
        model.predict(pa.table({"d": pa.array([1, 2], pa.timestamp("us"))}))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (np.zeros((4, 2), "f4"), r"should be \[batch, 3\], and has the shape \[4, 2\]"),
        (np.zeros((4, 3), "U1"), "should be float32, and is <U1"),
        ({"feature": np.zeros((4, 3))}, "no input 'feature'. Did you mean 'features'"),
    ],
)
def test_arrays_that_do_not_fit(given: Any, words: str) -> None:
    with pytest.raises(SignatureMismatch, match=words):
        regression().predict(given)


@pytest.mark.parametrize("value", [None, float("nan")])
def test_a_null_and_a_nan_name_the_column(value: float | None) -> None:
    table = pa.table({"a": [0.0] * 9, "b": [0.0] * 8 + [value], "c": [1] * 9})
    with pytest.raises(BadRow, match=r"column 'b' is .* in row 8") as caught:
        regression().predict(table)
    assert caught.value.column == "b"
    if value is not None:
        with pytest.raises(BadRow, match=r"column 'b' is NaN in row 8"):
            regression().predict(matrix(table.to_pandas()))


class Sums(nn.Module):
    def forward(self, numbers: torch.Tensor, city: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        return numbers.sum(1) + 10 * city + 100 * words.sum(1)


def test_rows_of_nulls_are_predicted_alone_as_among_others() -> None:
    """A column that holds nulls alone, as in a request of one row, has no type in pandas."""
    table = pd.DataFrame(
        {
            "a": [1.0, None, 3.0, None],
            "b": [1, 2, 3, 4],
            "city": ["Oslo", None, "Rome", None],
            "words": [["Oslo"], ["Rome", "Rome"], [], ["Oslo"]],
        }
    )
    vocabulary = ["Rome", "Oslo"]
    data = Data(
        None,
        columns={"numbers": ["a", "b"], "city": "city", "words": "words"},
        default_dtype="float32",
        vocabulary={"city": vocabulary, "words": vocabulary},
        nulls={"a": 7.0, "city": "Oslo"},
        pad={"words": 2},
    )
    schema = pa.Schema.from_pandas(table)
    inputs = tuple(Input.of(field, schema) for field in plan(schema, data, "train"))
    model = tr.Model(Sums(), Signature(inputs, (Output("y"),)))
    together = model.predict(table)
    assert together.tolist() == [112.0, 19.0, 6.0, 121.0]
    alone = [
        model.predict(pd.DataFrame(table.iloc[[row]].to_dict("records"), dtype=object)) for row in range(len(table))
    ]
    assert np.concatenate(alone).tolist() == together.tolist()
    with pytest.raises(BadRow, match="column 'b' is null in row 0"):
        model.predict(pd.DataFrame({**table.iloc[:1].to_dict("list"), "b": [None]}))
    with pytest.raises(BadRow, match="column 'words' is null in row 0"):
        model.predict(pd.DataFrame({**table.iloc[:1].to_dict("list"), "words": [None]}))


def test_a_column_of_nulls_is_an_array_also_where_its_length_is_one() -> None:
    table = pd.DataFrame({"words": [["Oslo"], []]})
    schema = pa.Schema.from_pandas(table)
    data = Data(None, columns={"words": "words"}, vocabulary={"words": ["Rome", "Oslo"]}, pad={"words": 1})
    (field,) = plan(schema, data, "train")
    model = tr.Model(nn.Flatten(0), Signature((Input.of(field, schema),), (Output("y"),)))
    together = model.predict(table)
    assert [model.predict(table.iloc[[row]])[0] for row in range(2)] == together.tolist()  # type: ignore[call-overload]
    with pytest.raises(BadRow, match="column 'words' is null in row 0"):
        model.predict(pd.DataFrame({"words": [None]}))


def test_a_batch_size_of_0_and_an_unknown_device() -> None:
    with pytest.raises(BadSetting, match=r"batch_size=0"):
        regression().predict(matrix(frame()), batch_size=0)
    with pytest.raises(BadSetting, match=r"no torch device"):
        regression().predict(matrix(frame()), device="warp")
    with pytest.raises(BadSetting, match=r"torch sees"):
        regression().predict(matrix(frame()), device="cuda:99")


# --- saving and loading


@pytest.mark.processes
def test_saved_by_value_and_read_without_spark(tmp_path: Path) -> None:
    scale = 3.0

    class Mine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(3, 1)
            self.register_buffer("shift", torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.line(x) * scale + self.shift

    model = regression(Mine(), history=[{"epoch": 0, "loss": 0.5}])
    path = str(tmp_path / "model")
    model.save(path)
    assert sorted(os.listdir(path)) == [
        "history.json", "manifest.json", "model.safetensors", "module.pkl", "signature.json",
    ]  # fmt: skip
    x = matrix(frame())
    np.save(tmp_path / "x.npy", x)
    out = fresh(
        """
        import numpy, tritium as tr
        model = tr.load(sys.argv[1] + "/model", trusted=True)
        print(model.history, *model.predict(numpy.load(sys.argv[1] + "/x.npy")).tolist())
        """,
        str(tmp_path),
    )
    assert out.split("] ")[0] == "[{'epoch': 0, 'loss': 0.5}"
    assert [float(v) for v in out.split("] ")[1].split()] == list(model.predict(x))


@pytest.mark.usefixtures("saved_elsewhere")
def test_code_by_value_needs_trust(tmp_path: Path) -> None:
    path = str(tmp_path / "model")
    regression().save(path)
    with pytest.raises(UntrustedModel, match=r"runs code from that file.*trusted=True.*trustModels"):
        tr.load(path)
    assert isinstance(tr.load(path, trusted=True).module, nn.Sequential)


NETS = """
import torch
class Net(torch.nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.first, self.second = torch.nn.Linear(3, width), torch.nn.Linear(width, 1)
    def forward(self, x):
        return self.second(self.first(x).relu())
def make():
    return Net(5)
number = 3
"""


def test_saved_by_import_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_own_nets.py").write_text(NETS)
    monkeypatch.syspath_prepend(str(tmp_path))
    import my_own_nets  # type: ignore[import-not-found]

    path = str(tmp_path / "model")
    model = regression(my_own_nets.make(), origin=my_own_nets.make)
    model.save(path)
    assert "module.pkl" not in os.listdir(path)
    assert json.loads(Path(path, "manifest.json").read_text())["module"] == {"import": "my_own_nets:make"}
    loaded = tr.load(path, trusted="my_own_nets:make")
    assert loaded.origin == "my_own_nets:make"
    assert (loaded.predict(frame()) == model.predict(frame())).all()

    monkeypatch.setattr(my_own_nets, "make", my_own_nets.Net)
    with pytest.raises(ModelError, match=r"weights don't fit what 'my_own_nets:make' makes now"):
        tr.load(path, trusted="my_own_nets:make")
    monkeypatch.setattr(my_own_nets, "make", os.getcwd)
    with pytest.raises(ModelError, match=r"no Python function"):
        tr.load(path, trusted="my_own_nets:make")
    monkeypatch.delitem(sys.modules, "my_own_nets")
    (tmp_path / "my_own_nets.py").unlink()
    with pytest.raises(ModelError, match=r"can't be imported here.*PYTHONPATH"):
        tr.load(path, trusted="my_own_nets:make")


TIED = """
import torch
class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
        self.b.weight = self.a.weight
        self.b.bias.requires_grad_(False)
        self.register_buffer("one", torch.ones(1))
        self.register_buffer("other", self.one)
        self.out = torch.nn.Linear(3, 1)
    def forward(self, x):
        return self.out(self.b(self.a(x))) * self.one
"""


@pytest.mark.parametrize("by_value", [False, True])
def test_tied_weights_are_tied_after_loading(by_value: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_tied_nets.py").write_text(TIED)
    monkeypatch.syspath_prepend(str(tmp_path))
    import my_tied_nets  # type: ignore[import-not-found]

    model = regression(my_tied_nets.Tied(), origin=None if by_value else my_tied_nets.Tied)
    model.save(str(tmp_path / "model"))
    loaded = tr.load(str(tmp_path / "model"), trusted=True)
    module: Any = loaded.module
    assert module.a.weight is module.b.weight
    assert module.one is module.other
    learns = {name: p.requires_grad for name, p in module.named_parameters()}
    assert learns == {name: p.requires_grad for name, p in model.module.named_parameters()}
    with torch.no_grad():
        module.a.weight.add_(1)
    assert (loaded.predict(frame()) != model.predict(frame())).any()
    model.module.load_state_dict(module.state_dict())
    assert (loaded.predict(frame()) == model.predict(frame())).all()
    monkeypatch.delitem(sys.modules, "my_tied_nets")


def test_what_can_not_be_imported_goes_by_value(tmp_path: Path) -> None:
    for origin in (lambda: nn.Linear(3, 1), nn.Linear(3, 1), None):
        assert regression(origin=origin).origin is None
    assert regression(origin=nn.Identity).origin == "torch.nn.modules.linear:Identity"


@pytest.mark.parametrize("place", ["memory://models", "memory://models[1]", "file://{}"])
def test_other_file_systems(place: str, tmp_path: Path) -> None:
    path = place.format(tmp_path) + "/bikes"
    model = regression()
    model.save(path)
    with pytest.raises(BadSetting, match=r"overwrite=True"):
        model.save(path)
    model.save(path, overwrite=True)
    assert (tr.load(path, trusted=True).predict(frame()) == model.predict(frame())).all()


def test_a_save_that_is_killed_leaves_the_old_model(tmp_path: Path) -> None:
    path = str(tmp_path / "model")
    model = regression()
    model.save(path)
    code = """
    import os, signal, sys
    from tritium.model import files
    def pieces():
        yield b"half"
        os.kill(os.getpid(), signal.SIGKILL)
    files.save(sys.argv[1], {"model.safetensors": pieces()}, {}, overwrite=True)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code), path], check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert (tr.load(path, trusted=True).predict(frame()) == model.predict(frame())).all()
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code), path + "2"], check=False, timeout=60)
    with pytest.raises(ModelError, match=r"there is nothing"):
        tr.load(path + "2")


def test_an_interrupted_save_leaves_nothing(tmp_path: Path) -> None:
    def pieces() -> Any:
        yield b"half"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        files.save(str(tmp_path / "model"), {"model.safetensors": pieces()}, {}, overwrite=False)
    assert os.listdir(tmp_path) == []
    with pytest.raises(KeyboardInterrupt):
        files.save("memory://half/model", {"model.safetensors": pieces()}, {}, overwrite=False)
    with pytest.raises(ModelError, match=r"incomplete model"):
        tr.load("memory://half/model")


@pytest.mark.parametrize("place", ["memory://saved", "{}"])
def test_a_transaction_of_the_users_does_not_hold_a_model_back(place: str, tmp_path: Path) -> None:
    path, model = place.format(tmp_path) + "/mine", regression()
    with fsspec.url_to_fs(path)[0].transaction:
        model.save(path)
        assert (tr.load(path, trusted=True).predict(frame()) == model.predict(frame())).all()


@pytest.mark.parametrize("place", ["memory://things", "{}"])
def test_only_a_model_is_overwritten(place: str, tmp_path: Path) -> None:
    path = place.format(tmp_path) + "/mine"
    system, root = fsspec.url_to_fs(path)
    system.makedirs(root)
    system.pipe(f"{root}/letter.txt", b"dear")
    for target in (path, f"{path}/letter.txt"):
        with pytest.raises(BadSetting, match=r"holds 'letter.txt', which is no part of a model"):
            regression().save(target, overwrite=True)
    assert system.cat(f"{root}/letter.txt") == b"dear"


def test_without_an_exchange_of_names_two_renames_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_exchange", lambda one, other: False)
    path = str(tmp_path / "model")
    regression().save(path)
    model = regression()
    model.save(path, overwrite=True)
    assert os.listdir(tmp_path) == ["model"]
    assert (tr.load(path, trusted=True).predict(frame()) == model.predict(frame())).all()


def test_a_damaged_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model"
    regression().save(str(path))
    whole = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ModelError, match=r"model.safetensors of the model at .* is damaged"):
        tr.load(str(path), trusted=True)
    (path / "model.safetensors").write_bytes(whole[:-4])
    with pytest.raises(ModelError, match=r"damaged"):
        tr.load(str(path), trusted=True)
    (path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"incomplete: model.safetensors is missing"):
        tr.load(str(path), trusted=True)
    (path / "manifest.json").write_text('{"format": 2}')
    with pytest.raises(ModelError, match=r"format 2"):
        tr.load(str(path), trusted=True)


# --- weights


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 3)
        self.back = nn.Linear(3, 7, bias=False)
        self.back.weight = self.words.weight
        self.small = nn.Parameter(torch.randn(3, 5).bfloat16(), requires_grad=False)
        self.turned = nn.Parameter(torch.randn(3, 5).T)
        self.register_buffer("count", torch.tensor(3, dtype=torch.int64))
        self.register_buffer("none", torch.zeros(0, 4))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.lstm = nn.LSTM(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.back(self.lstm(x[:, None])[0][:, 0, :3] * self.count)[:, :1]


def test_every_kind_of_weight_comes_back(tmp_path: Path) -> None:
    module = Mixed()
    model = regression(module)
    path = str(tmp_path / "model")
    model.save(path)
    loaded = tr.load(path, trusted=True).module
    theirs = load_file(path + "/model.safetensors")
    for name, value in module.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)
        assert loaded.state_dict()[name].dtype == value.dtype
        assert name == "back.weight" or torch.equal(theirs[name], value)
    assert loaded.back.weight is loaded.words.weight
    assert not loaded.small.requires_grad
    assert loaded.turned.requires_grad
    assert (tr.Model(loaded, model.signature).predict(frame()) == model.predict(frame())).all()


def test_a_file_of_the_safetensors_library(tmp_path: Path) -> None:
    tensors = {"x": torch.randn(3, 4), "y": torch.arange(5), "z": torch.randn(2).double()}
    save_file(tensors, tmp_path / "t.safetensors")
    found = weights.read(files.mapped(str(tmp_path / "t.safetensors")))
    assert all(torch.equal(found[name], value) for name, value in tensors.items())


def test_weights_go_out_in_pieces_and_come_in_as_a_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_CHUNK", 1 << 10)
    module = nn.Linear(100, 100)
    tensors = weights.Tensors.of(module)
    pieces = [bytes(piece) for piece in tensors.stream()]
    assert max(map(len, pieces[1:])) == 1 << 10
    path = tmp_path / "w.safetensors"
    path.write_bytes(b"".join(pieces))
    found = weights.read(files.mapped(str(path)))
    assert torch.equal(found["weight"], module.weight)
    start, end = next(
        (int(part, 16) for part in line.split()[0].split("-")) for line in open_maps() if line.endswith(str(path))
    )
    assert start <= found["weight"].data_ptr() < end
    found["weight"].zero_()  # a private map: the file stays as it is
    assert torch.equal(weights.read(files.mapped(str(path)))["weight"], module.weight)


def open_maps() -> list[str]:
    return Path("/proc/self/maps").read_text().splitlines()


@pytest.mark.parametrize("damage", [b"", b"\xff" * 8, (1 << 40).to_bytes(8, "little") + b"{}"])
def test_what_is_no_safetensors_file(damage: bytes) -> None:
    with pytest.raises(ModelError, match=r"no safetensors file"):
        weights.read(bytearray(damage))


def test_what_safetensors_can_not_hold() -> None:
    class Odd(nn.Module):
        def get_extra_state(self) -> Any:
            return {"x": 1}

        def set_extra_state(self, state: Any) -> None:
            pass

    with pytest.raises(BadSetting, match=r"_extra_state.*is a dict"):
        weights.Tensors.of(Odd())
    sparse = nn.Module()
    sparse.register_buffer("s", torch.eye(2).to_sparse())
    with pytest.raises(BadSetting, match=r"'s' is a torch.float32 tensor of layout torch.sparse_coo"):
        weights.Tensors.of(sparse)


def test_the_digest_and_the_checksums_change_with_the_weights_and_nothing_else() -> None:
    module = nn.Linear(3, 1)
    seen = set()
    for write in (
        lambda weight: None,
        lambda weight: weight.data.mul_(2),
        lambda weight: np.copyto(weight.detach().numpy(), 3),
        lambda weight: weight.detach().numpy().view("u4").__ixor__(1),  # the last bit of each
    ):
        write(module.weight)
        tensors = weights.Tensors.of(module)
        assert weights.Tensors.of(module).digest() == tensors.digest()
        assert weights.Tensors.of(module).checksums() == tensors.checksums()
        seen.add((tensors.digest(), tensors.checksums()))
    assert len({digest for digest, _ in seen}) == len({checksums for _, checksums in seen}) == 4


# --- another device


def elsewhere(copies: Copies, module: nn.Module) -> nn.Module:
    return copies.on(torch.device("cpu", 0), module)  # what "cuda" is on a machine that has one


def test_a_copy_on_another_device_is_kept_and_has_the_weights_of_now() -> None:
    module, copies = Mixed(), Copies()
    made = elsewhere(copies, module)
    assert made is not module
    for write in (
        lambda: module.small.data.add_(1),
        lambda: np.copyto(module.turned.detach().numpy(), 7),
        lambda: module.count.add_(4),
        lambda: module.load_state_dict(
            {n: t + 1 if t.is_floating_point() else t for n, t in Mixed().state_dict().items()}
        ),
    ):
        write()
        assert elsewhere(copies, module) is made
        assert all(torch.equal(made.state_dict()[name], value) for name, value in module.state_dict().items())
    assert made.back.weight is made.words.weight
    assert not made.training
    assert module.training


def test_a_changed_module_gets_a_new_copy() -> None:
    module, copies = nn.Sequential(nn.Linear(3, 4), nn.LeakyReLU(0.1), nn.Linear(4, 1)), Copies()
    x = torch.randn(5, 3)
    for change in (
        lambda: setattr(module[1], "negative_slope", 0.9),
        lambda: module.append(nn.Linear(1, 1)),
        lambda: module[0].register_forward_hook(lambda layer, given, out: out * 2),
    ):
        before = elsewhere(copies, module)
        change()
        assert elsewhere(copies, module) is not before
        assert torch.equal(elsewhere(copies, module)(x), module(x))
    module[0] = nn.Linear(3, 4)  # another one, but the same in all but its weights
    assert torch.equal(elsewhere(copies, module)(x), module(x))


def test_a_module_that_can_not_be_pickled_is_copied_for_each_call() -> None:
    module, copies = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4)).eval(), Copies()
    x = torch.randn(5, 3)
    before = elsewhere(copies, module)
    module.bias.data.add_(1)
    assert elsewhere(copies, module) is not before
    assert torch.equal(elsewhere(copies, module)(x), module(x))


def test_a_copy_holds_no_gradients_and_is_not_pickled() -> None:
    module, copies = nn.Linear(3, 1), Copies()
    module(torch.ones(2, 3)).sum().backward()
    made = elsewhere(copies, module)
    assert [p.grad for p in made.parameters()] == [None, None]
    assert module.weight.grad is not None
    assert len(pickle.dumps(copies)) < 200
    model = regression()
    copy.deepcopy(model)
    pickle.loads(cloudpickle.dumps(model))


@pytest.mark.gpu
def test_predict_on_a_gpu_keeps_one_copy_there() -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    model = regression()
    first = model.predict(frame(), device="cuda")
    used = torch.cuda.memory_allocated()
    model.module[2].bias.data.add_(1)
    np.testing.assert_allclose(model.predict(frame(), device="cuda"), first + 1, rtol=1e-4)
    assert torch.cuda.memory_allocated() == used
    assert next(model.module.parameters()).device.type == "cpu"
