"""Every param map of a tuner trains in a directory of its own below `run_dir`, with a readable name."""

from __future__ import annotations

import gc
import json
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
import torch
from pyspark.ml import Pipeline
from torch import nn

from tritium.errors import BadSetting
from tritium.ml import TorchEstimator
from tritium.ml.run_dirs import below, name_of_map, write_params
from tritium.ml.torch.identity import opened


class Rows:
    """A stand-in for a DataFrame, of which only the identity is used here."""

    def __init__(self, content: int) -> None:
        self.content = content

    def semanticHash(self) -> int:
        return self.content


def test_a_name_says_what_the_values_are_and_is_another_for_other_values() -> None:
    assert name_of_map({"epochs": 5, "batch_size": 16}, opened) == "batch_size=16,epochs=5"
    assert name_of_map({"clip_grad_norm": 0.5}, opened) == "clip_grad_norm=0.5"
    maps: list[dict[str, Any]] = [
        {"optimizer": lambda p: torch.optim.Adam(p, 0.1)},
        {"optimizer": lambda p: torch.optim.Adam(p, 0.2)},
        {"feature_cols": ["a", "b"]},
        {"feature_cols": ["a+b"]},
        {"weight_col": "a/b"},
        {"weight_col": "a b"},
        {"row_key": "x" * 200},
        {"row_key": "x" * 201},
        {},
    ]
    names = [name_of_map(one, opened) for one in maps]
    assert len(set(names)) == len(names)
    assert names[0].startswith("optimizer=_lambda_-")
    assert all("/" not in name and len(name) < 100 for name in names)
    assert names == [name_of_map(one, opened) for one in maps]


def test_a_fold_keeps_its_number_and_threads_make_no_difference() -> None:
    fitted: dict[str, list[int]] = {}
    assert below("/runs", {"epochs": 1}, Rows(7), fitted, opened) == "/runs/epochs=1/1"
    assert below("/runs/", {"epochs": 1}, Rows(8), fitted, opened) == "/runs/epochs=1/2"
    assert below("/runs", {"epochs": 1}, Rows(7), fitted, opened) == "/runs/epochs=1/1", "called again: it continues"
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: below("/runs", {"epochs": i % 20}, Rows(9), fitted, opened), range(400)))
    assert sorted(set(found)) == sorted({f"/runs/epochs={i}/{3 if i == 1 else 1}" for i in range(20)})


@pytest.mark.parametrize("make", [lambda i: pd.DataFrame({"a": [i]}), lambda i: pa.table({"a": [i]})])
def test_a_table_that_is_gone_does_not_give_its_number_to_another(make: Any) -> None:
    """CPython uses an address again at once, and with it the id of what was there."""
    fitted: dict[str, list[int]] = {}
    kept = make(-1)
    places = [below("/runs", {}, kept, fitted, opened)]
    for i in range(5):
        places.append(below("/runs", {}, make(i), fitted, opened))
        gc.collect(1)
    assert places == [f"/runs/default/{i}" for i in range(1, 7)]
    assert below("/runs", {}, kept, fitted, opened) == places[0], "the same object continues where it was"
    held = weakref.ref(table := make(0))
    below("/runs", {}, table, fitted, opened)
    del table
    gc.collect(1)
    assert held() is None, "an estimator does not keep the tables that it was fitted on"


def estimator(**changes: Any) -> TorchEstimator:
    return TorchEstimator(
        model=lambda: nn.Linear(1, 1),
        loss=nn.MSELoss(),
        optimizer=torch.optim.Adam,
        feature_cols=["a"],
        label_cols=["y"],
        **changes,
    )


def test_a_copy_knows_its_param_map_in_a_pipeline_too() -> None:
    one, other = estimator(run_dir="/runs"), estimator()
    assert one.copy({one.epochs: 3})._param_map == {"epochs": 3}
    assert one.copy({one.epochs: 3}).copy({one.seed: 1})._param_map == {"epochs": 3, "seed": 1}
    assert one.copy()._param_map == {}
    (stage,) = Pipeline(stages=[one]).copy({one.epochs: 3, other.epochs: 5}).getStages()
    assert stage._param_map == {"epochs": 3, "TorchEstimator.epochs": 5}
    assert stage._fitted is one._fitted


def test_params_are_written_with_where_functions_are(tmp_path: Path) -> None:
    write_params(str(tmp_path / "new" / "1"), {"epochs": 3, "optimizer": lambda p: torch.optim.Adam(p)}, opened)
    told = json.loads((tmp_path / "new" / "1" / "params.json").read_text())
    assert told["epochs"] == "3"
    assert "test_run_dirs.py, line " in told["optimizer"]
    (tmp_path / "file").touch()
    with pytest.raises(BadSetting, match=r"run_dir='.*/file/1' can't be written: "):
        write_params(str(tmp_path / "file" / "1"), {}, opened)
