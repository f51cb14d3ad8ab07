"""A directory that is no model, or whose JSON holds other things than a save writes: a ModelError, whatever it is."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import tritium as tr
from tritium.errors import ModelError, TritiumError
from tritium.model.engines.function import Functions
from tritium.model.signature import Input, Output, Signature

ROWS = pd.DataFrame({"a": [1.0, 2.0], "b": [0.5, 0.25], "word": ["x", "y"], "text": ["abc", "z"]})
OTHER: list[Any] = [None, True, 0, -1, 3, 1.5, 10**30, "", "x", [], [1], ["x"], [None], {}, {"a": 1}, [[]], {"a": {}}]
JSON = ("manifest.json", "signature.json", "history.json")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(3, 2), nn.Linear(5, 2)

    def forward(self, x: torch.Tensor, word: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return self.last(torch.cat([x, self.words(word), text], 1))


def of_torch() -> tr.Model:
    def train() -> Any:
        return tr.Model(
            Net(),
            example=tr.world().shard("train"),
            task="classification",
            transform=lambda inputs: inputs,
            label_words={"y": ["no", "yes"]},
            history=[{"loss": 1.0}],
            inputs=["x", "word", "text"],
        )

    data = tr.Data(
        ROWS,
        columns={"x": ["a", "b"], "word": "word", "text": "text"},
        vocabulary={"word": ["x", "y"]},
        nulls={"a": 1.0},
        unknown_words="keep",
        decode={"text": lambda text: np.float32([len(text)])},
    )
    (model,) = tr.launch(train, on="here", data={"train": data}, progress=False, output="none")
    return model


def of_function() -> tr.Model:
    signature = Signature((Input("x", ("a", "b"), "float32", (2,)),), (Output("prediction", "float64"),))
    functions = Functions({"weights": np.arange(2.0)}, lambda state, batch: batch["x"] @ state["weights"])
    return tr.Model(functions, signature, engine="function")


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the place of every value within a JSON value."""
    yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from paths(inner, (*path, key))


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """Return a copy with another value in this place; `...` leaves it out."""
    if not path:
        return new if new is not ... else {}
    made = copy.deepcopy(value)
    inner = made
    for key in path[:-1]:
        inner = inner[key]
    if new is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = new
    return made


def write(folder: Path, name: str, content: str) -> None:
    """Write a file of a saved model, with its size and checksum in the manifest."""
    (folder / name).write_text(content)
    if name != "manifest.json":
        place = folder / "manifest.json"
        manifest = json.loads(place.read_text())
        manifest["files"][name] = {
            "bytes": len(content.encode()),
            "sha256": hashlib.sha256(content.encode()).hexdigest(),
        }
        place.write_text(json.dumps(manifest))


def _unless_there(source: str, target: str) -> None:
    """Leave a file that an earlier example has mapped."""
    if not Path(target).exists():
        shutil.copy(source, target)


@pytest.fixture(scope="module", params=["torch", "function"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "model"
    model = of_torch() if request.param == "torch" else of_function()
    model.save(str(folder))
    assert len(tr.load(str(folder), trusted=True).transform(ROWS)) == 2
    return folder


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(draw=st.data())
def test_a_field_of_another_type(saved: Path, tmp_path: Path, draw: st.DataObject) -> None:
    folder = tmp_path / "m"
    shutil.copytree(saved, folder, dirs_exist_ok=True, copy_function=_unless_there)
    for name in JSON:
        shutil.copy(saved / name, folder / name)
    name = draw.draw(st.sampled_from(JSON))
    before = json.loads((saved / name).read_text())
    path = draw.draw(st.sampled_from(list(paths(before))))
    old = functools.reduce(lambda value, key: value[key], path, before)
    others = [new for new in OTHER if type(new) is not type(old)]
    after = changed(before, path, draw.draw(st.sampled_from([..., *others])))
    write(folder, name, json.dumps(after))
    try:
        model = tr.load(str(folder), trusted=True)
    except ModelError:
        return
    try:
        model.predict(ROWS)
    except TritiumError:
        return


@pytest.mark.parametrize("name", JSON)
@pytest.mark.parametrize("content", ["", "{", "[" * 100_000, '"text"', "3", "null"])
def test_no_json_or_another(saved: Path, tmp_path: Path, name: str, content: str) -> None:
    shutil.copytree(saved, tmp_path / "m")
    write(tmp_path / "m", name, content)
    with pytest.raises(ModelError, match="damaged"):
        tr.load(str(tmp_path / "m"), trusted=True)


def test_a_path_that_is_no_directory_of_a_model(saved: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    file.write_bytes(b"123")
    with pytest.raises(ModelError, match="that is a file, and a model is a directory"):
        tr.load(str(file))
    with pytest.raises(ModelError, match="there is nothing"):
        tr.load(str(file / "below"))
    with pytest.raises(ModelError, match="there is nothing"):
        tr.load(str(tmp_path / "missing"))
    (tmp_path / "odd" / "manifest.json").mkdir(parents=True)
    with pytest.raises(ModelError, match="an incomplete model"):
        tr.load(str(tmp_path / "odd"))
    shutil.copytree(saved, tmp_path / "m")
    weights = next(p for p in (tmp_path / "m").iterdir() if p.name in ("model.safetensors", "state.bin"))
    weights.unlink()
    weights.mkdir()
    with pytest.raises(ModelError, match=f"{weights.name} is missing"):
        tr.load(str(tmp_path / "m"), trusted=True)


def test_a_signature_by_hand_with_a_wrong_type() -> None:
    with pytest.raises(tr.errors.BadSetting, match=r"Input 'x': 'dtype' is 'floaty', and must be the name of a dtype"):
        Input("x", ("a",), "floaty")
    with pytest.raises(tr.errors.BadSetting, match=r"Input 'x': 'columns' is 'temp', and must be a list"):
        Input("x", "temp")  # type: ignore[arg-type]
