"""The types in the batches of a launch: torch tensors where the function uses torch, NumPy arrays elsewhere."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import tritium as tr
from tritium.errors import BadRow
from tritium.gang.driver.captures import uses
from tritium.ml.torch.estimator import TorchEstimator

FRAME = pd.DataFrame({"x": [0.1, 0.2, 0.3], "k": [5, 1_700_000_001, 7], "name": [b"a", b"b", b"c"]})
COLUMNS = {"both": ["x", "x"], "x": "x", "k": "k", "ks": ["k", "k"], "name": "name"}
WHERE = [{"on": "here"}, {"on": "driver"}]


def batch(**how: Any) -> Any:
    """Return the kinds, dtypes and values of the first batch."""
    epoch = next(tr.world().shard("train").epochs(1, batch_size=3, shuffle=False, **how))
    return {
        name: (type(column).__name__, str(column.dtype).removeprefix("torch."), column.tolist())
        for name, column in next(iter(epoch)).items()
    }


def with_torch(**how: Any) -> Any:
    assert torch.get_default_dtype() == torch.float32
    return batch(**how)


def with_a_layer(**how: Any) -> Any:
    nn.Linear(1, 1)
    return batch(**how)


def importing_torch(**how: Any) -> Any:
    import torch.utils.data  # noqa: F401

    return batch(**how)


def launched(function: Any, where: dict[str, Any], data: Any = None, **how: Any) -> Any:
    given = tr.Data(FRAME, COLUMNS) if data is None else data
    return tr.launch(function, kwargs=how, data={"train": given}, progress=False, **where)[0]


SINGLE = [float(np.float32(value)) for value in FRAME["x"]]


@pytest.mark.processes
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("function", [with_torch, with_a_layer, importing_torch, functools.partial(with_torch)])
def test_a_function_of_torch_gets_float32_tensors(where: dict[str, Any], function: Any) -> None:
    got = launched(function, where)
    assert got["x"] == ("Tensor", "float32", SINGLE)
    assert got["both"] == ("Tensor", "float32", [[value, value] for value in SINGLE])
    assert got["k"] == ("Tensor", "int64", FRAME["k"].tolist())  # an index stays an index
    assert got["ks"][:2] == ("Tensor", "int64")
    assert got["name"] == ("ndarray", "object", [b"a", b"b", b"c"])  # no tensor holds bytes


@pytest.mark.processes
@pytest.mark.parametrize("where", WHERE)
def test_every_other_function_gets_numpy_arrays_without_a_digit_lost(where: dict[str, Any]) -> None:
    assert "torch" in globals()  # that this module imports it, or this process, says nothing of the function
    got = launched(batch, where)
    assert {name: kind for name, (kind, *_) in got.items()} == dict.fromkeys(COLUMNS, "ndarray")
    assert got["x"] == ("ndarray", "float64", FRAME["x"].tolist())


@pytest.mark.processes
@pytest.mark.parametrize("where", WHERE)
def test_what_is_asked_for_counts(where: dict[str, Any]) -> None:
    assert launched(batch, where | {"framework": "torch"})["x"] == ("Tensor", "float32", SINGLE)
    whole = launched(with_torch, where, tr.Data(FRAME, ["x", "k"], dtype="float64"))
    assert (whole["x"], whole["k"][1]) == (("Tensor", "float64", FRAME["x"].tolist()), "int64")
    own = launched(with_torch, where, tr.Data(FRAME, {"a": "x", "b": "x"}, dtype={"a": "float64"}))
    assert (own["a"][1], own["b"][1]) == ("float64", "float32")
    assert launched(with_torch, where, device=None)["x"] == ("ndarray", "float32", SINGLE)
    assert launched(batch, where, tr.Data(FRAME, ["x"]), device="cpu")["x"] == (
        "Tensor",
        "float64",
        FRAME["x"].tolist(),
    )


def test_an_integer_that_float32_would_round_is_refused_where_it_is_packed_with_floats() -> None:
    mixed = {"both": ["x", "k"]}
    with pytest.raises(BadRow, match=r"column 'k' .* is 1,700,000,001, an integer beyond 16,777,215"):
        launched(with_torch, {"on": "here"}, tr.Data(FRAME, mixed))
    asked = launched(with_torch, {"on": "here"}, tr.Data(FRAME, mixed, dtype="float64"))
    assert asked["both"][2][1] == [0.2, 1_700_000_001]


def test_a_linear_layer_takes_a_batch_as_it_is() -> None:
    def train() -> float:
        net, loss = nn.Linear(2, 1), nn.MSELoss()
        (epoch,) = tr.world().shard("train").epochs(1, batch_size=3)
        return sum(loss(net(batch["features"]), batch["y"][:, None]).item() for batch in epoch)

    table = pd.DataFrame({"a": np.arange(3.0), "b": np.arange(3.0), "y": np.arange(3.0)})
    data = {"train": tr.Data(table, {"features": ["a", "b"], "y": "y"})}
    (loss,) = tr.launch(train, on="here", progress=False, data=data)
    assert loss >= 0


def test_how_it_is_seen_that_a_function_uses_torch() -> None:
    class Net(nn.Module):
        pass

    def nested() -> Any:
        return lambda: torch.zeros(1)

    net, plain = Net(), object()
    assert all(uses(fn, "torch") for fn in (with_torch, nested, lambda: Net, lambda: net, net, torch.zeros))
    assert uses(batch, "torch", [net])
    assert not any(uses(fn, "torch") for fn in (batch, lambda: plain, lambda: TorchEstimator.__name__ and None, print))


@pytest.mark.parametrize("name", ["jpeg", "image"])
def test_bytes_are_decoded_by_the_name_of_their_column_or_of_the_batchs(name: str) -> None:
    frame = pd.DataFrame({"jpeg": [b"\1", b"\2", b"\3"]})
    data = tr.Data(frame, {"image": "jpeg"}, decode={name: lambda content: np.frombuffer(content, np.uint8)})
    assert launched(with_torch, {"on": "here"}, data)["image"] == ("Tensor", "uint8", [[1], [2], [3]])
