"""The shapes of rows are known on the driver from the first row of a table."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from tritium.errors import BadSetting
from tritium.ml.columns import find_columns
from tritium.ml.row_shapes import with_shapes
from tritium.ml.torch.settings import TorchSettings


def png(mode: str = "RGB", size: tuple[int, int] = (5, 4)) -> bytes:
    content = io.BytesIO()
    Image.new(mode, size).save(content, "png")
    return content.getvalue()


def table(rows: int = 3) -> pa.Table:
    columns: dict[str, Any] = {
        "list": [[1.0, 2.0]] * rows,
        "matrix": [[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]] * rows,
        "ragged": [[[1.0, 2.0], [4.0]]] * rows,
        "none": pa.array([None] + [[1.0]] * (rows - 1), pa.list_(pa.float64())),
        "png": [png()] * rows,
        "path": ["a.png"] * rows,
        "number": list(range(rows)),
    }
    types = {"list": pa.list_(pa.float64()), "matrix": pa.list_(pa.list_(pa.float32())), "png": pa.binary()}
    arrays = {name: pa.array(values, types.get(name)) for name, values in columns.items()}
    return pa.table(arrays)


def shape_of(column: str, frame: pa.Table | None = None, **settings: Any) -> tuple[Any, str]:
    rows = table() if frame is None else frame
    given = TorchSettings(
        model=lambda: None, loss=len, optimizer=len, feature_cols=column, label_cols="number", **settings
    )
    fields = {field.name: field for field in find_columns(rows, given).fields(rows, "train")}
    found = with_shapes(rows, fields, given)["features"]
    return found.shape, found.dtype


def image(content: bytes) -> Image.Image:
    return Image.open(io.BytesIO(content))


@pytest.mark.parametrize(
    ("column", "decode", "shape", "dtype"),
    [
        ("list", None, (2,), "float32"),
        ("matrix", None, (2, 3), "float32"),
        ("ragged", None, None, "float32"),
        ("none", None, None, "float32"),
        ("png", image, (4, 5, 3), "uint8"),
        ("path", lambda path: np.zeros((len(path), 1), np.float16), (5, 1), "float16"),
        ("number", [np.zeros((2, 2))] * 3, (2, 2), "float64"),
        ("path", lambda path: np.load(path), None, "uint8"),
        ("path", lambda path: {}[path], None, "uint8"),
        ("path", lambda path: None, None, "uint8"),
    ],
    ids=["list", "matrix", "ragged", "null", "image", "path", "dataset", "no file", "of values", "nothing"],
)
def test_of_a_table(column: str, decode: Any, shape: Any, dtype: str) -> None:
    settings = {} if decode is None else {"decode": {column: decode}}
    assert shape_of(column, **settings) == (shape, dtype)
    assert shape_of(column, table().slice(0, 0), **settings)[0] is None


def test_of_a_model_that_is_not_tried_nothing_is_decoded() -> None:
    asked: list[str] = []
    assert shape_of("path", decode={"path": asked.append}, check="off") == (None, "uint8")
    assert asked == []


def test_a_decode_that_can_take_no_value_is_refused() -> None:
    with pytest.raises(BadSetting, match=r"decode=\{'png': <lambda>\} fails for the first value: AttributeError: 'byt"):
        shape_of("png", decode={"png": lambda content: content.read()})
