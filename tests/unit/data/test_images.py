"""Spark's struct of an image is a column of arrays [height, width, channels], in tables too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from torch import nn

import tritium as tr
from tritium.errors import BadRow
from tritium.ml import TorchModel, fit

HERE: dict[str, Any] = {"on": "here", "progress": False, "output": "none"}
SCHEMA = pa.struct(
    [
        ("origin", pa.string()),
        ("height", pa.int32()),
        ("width", pa.int32()),
        ("nChannels", pa.int32()),
        ("mode", pa.int32()),
        ("data", pa.binary()),
    ]
)


def images(rows: int = 6, shape: tuple[int, ...] = (4, 5, 3)) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).integers(0, 256, (rows, *shape)).astype(np.uint8)


def struct_of(image: np.ndarray[Any, Any], **other: Any) -> dict[str, Any]:
    height, width, channels = image.shape
    size = {"height": height, "width": width, "nChannels": channels, "mode": 8 * (channels - 1)}
    return {"origin": "file:/a.png", **size, "data": image.tobytes(), **other}


def table(pixels: np.ndarray[Any, Any]) -> pa.Table:
    return pa.table(
        {"image": pa.array([struct_of(one) for one in pixels], SCHEMA), "y": pixels.mean((1, 2, 3)) / np.float64(255)}
    )


class Mean(nn.Module):
    """A module of images with their channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: Any) -> Any:
        return self.layer(x.float().mean((1, 2)) / 255)


TORCH: dict[str, Any] = {
    "model": Mean,
    "loss": nn.MSELoss(),
    "optimizer": lambda p: torch.optim.SGD(p, 0.1),
    "feature_cols": "image",
    "label_cols": ["y"],
    "verbose": False,
    **HERE,
}


def test_batches_of_a_shard() -> None:
    def read() -> Any:
        shard = tr.world().shard("train")
        (epoch,) = shard.epochs(1, batch_size=6, shuffle=False, device=None)
        (batch,) = epoch
        return batch["image"], batch["y"], shard.schema[0].content

    (found,) = tr.launch(read, data={"train": table(images())}, **HERE)
    np.testing.assert_array_equal(found[0], images())
    assert found[2] == "image"


def test_trained_and_scored_as_they_are(tmp_path: Any) -> None:
    model = fit(table(images()), **TORCH)
    assert model.signature.inputs[0].shape == (4, 5, 3)
    assert model.signature.inputs[0].dtype == "uint8"
    found = model.predict(table(images()))
    np.testing.assert_array_equal(found, model.predict(images()))
    frame = pd.DataFrame({"image": [struct_of(one) for one in images()]})
    np.testing.assert_array_equal(TorchModel(model).transform(frame)["prediction"], found)
    model.save(str(tmp_path / "model"))
    np.testing.assert_array_equal(tr.load(str(tmp_path / "model"), trusted=True).predict(frame), found)


def test_a_function_takes_each_as_an_array() -> None:
    half = lambda image: image[::2, ::2].astype(np.float32)  # noqa: E731
    model = fit(table(images()), **TORCH, decode={"image": half})
    assert model.signature.inputs[0].shape == (2, 3, 3)
    small = table(images()[:, ::2, ::2]).set_column(1, "y", table(images())["y"])
    np.testing.assert_array_equal(model.predict(table(images())), fit(small, **TORCH).predict(small))


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"mode": 21}, "an image of mode 21 does not hold bytes"),
        ({"height": -1, "width": -1, "data": b""}, "Spark could not read this image"),
        ({"height": 2}, "cannot reshape array of size 60"),
    ],
    ids=["floats", "invalid", "cut"],
)
def test_one_that_can_not_be_read_is_named(other: dict[str, Any], says: str) -> None:
    pixels = images(3)
    structs = [struct_of(pixels[0]), struct_of(pixels[1], **other), struct_of(pixels[2])]
    bad = pa.table({"image": pa.array(structs, SCHEMA), "y": [0.0, 1.0, 2.0]})
    with pytest.raises(BadRow, match=says) as caught:
        fit(bad, **TORCH)
    assert caught.value.column == "image"
    model = fit(table(images()), **TORCH)
    found = TorchModel(model).setParams(on_error="null").transform(bad.to_pandas())["prediction"]
    assert found.isna().tolist() == [False, True, False]


def test_a_null_and_another_size() -> None:
    with pytest.raises(BadRow, match=r"column 'image'.* is null"):
        fit(pa.table({"image": pa.array([struct_of(images()[0]), None], SCHEMA), "y": [0.0, 1.0]}), **TORCH)
    both = pa.array([struct_of(images()[0]), struct_of(images(1, (4, 4, 3))[0])], SCHEMA)
    with pytest.raises(BadRow, match="a batch needs one shape"):
        fit(pa.table({"image": both, "y": [0.0, 1.0]}), **TORCH)


@pytest.mark.parametrize("decode", [{}, {"image": lambda image: image[:2]}], ids=["as they are", "decoded"])
def test_a_model_made_in_a_rank_takes_them(decode: dict[str, Any]) -> None:
    """Of the shard and of an item of its loader; the user's function is applied once."""
    pixels = images()

    def train() -> Any:
        shard = tr.world().shard("train")
        examples = (shard, next(iter(shard.loader(batch_size=2))))
        return [tr.Model(Mean(), example=example, inputs="image") for example in examples]

    (models,) = tr.launch(train, data={"train": tr.Data(table(pixels), decode=decode)}, **HERE)
    for model in models:
        taken = torch.tensor(pixels[:, :2] if decode else pixels)
        expected = model.module(taken)[:, 0].detach().numpy()
        np.testing.assert_allclose(model.predict(table(pixels)), expected, rtol=1e-5)
        assert model.decode.keys() == decode.keys()
