"""How many rows a model is called with: what is asked for, what is found at run time, and what memory allows."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from torch import nn

import tritium as tr
from tritium.errors import BadSetting
from tritium.ml import TorchModel
from tritium.model.calls import CallState, Computing
from tritium.model.signature import Input, Output, Signature
from tritium.predict.worker import _gathered

SIGNATURE = Signature((Input("x", ("a",), "float32", (1,)),), (Output("y", shape=(1,)),))
MIB = 1 << 20


def sizes(seconds_of: dict[int, float], calls: int = 60) -> list[int]:
    """Return the sizes of calls that take these seconds."""
    found = CallState("auto")
    asked = []
    for _ in range(calls):
        asked.append(found.rows)
        found.on_success(found.rows, seconds_of.get(found.rows, 1.0))
    return asked


def test_the_size_grows_while_rows_per_second_grow() -> None:
    overhead = {64 << n: 0.010 + (64 << n) * 1e-5 for n in range(12)}
    asked = sizes(overhead)
    assert asked[:7] == [64, 64, 64, 128, 128, 128, 256]
    assert asked[-1] == asked[-9] >= 4096, "the overhead of a call is that of 1000 rows"


def test_it_goes_back_to_the_fastest_and_stays() -> None:
    cache = {64: 64 / 1000, 128: 128 / 2000, 256: 256 / 4000, 512: 512 / 3000}
    asked = sizes(cache)
    assert max(asked) == 512
    assert asked[-40:] == [256] * 40


def test_the_last_rows_of_a_batch_tell_nothing() -> None:
    calls = CallState("auto")
    for _ in range(50):
        calls.on_success(3, 1e-9)
    assert calls.rows == 64


def test_it_has_a_bound() -> None:
    assert max(sizes({64 << n: 1.0 for n in range(40)}, 200)) == 65_536


class Hungry(nn.Module):
    """A model that allocates 32 MiB for a row, and notes the rows of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows.append(len(x))
        return x + torch.empty(len(x), 32 * MIB // 4)[:, :1].zero_()


@contextmanager
def address_space(more: int) -> Iterator[None]:
    """Let this process allocate no more than so many bytes beside what it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("batch_size", ["auto", 100])
@pytest.mark.parametrize("on_error", ["fail", "column"])
def test_real_lack_of_memory_halves_the_batch_and_goes_on(batch_size: int | str, on_error: str) -> None:
    module = Hungry()
    model = tr.Model(module, SIGNATURE)
    data = pd.DataFrame({"a": np.arange(200.0)})
    with address_space(768 * MIB):
        found = model.predict(data, batch_size=batch_size, on_error=on_error)  # type: ignore[arg-type]
        halved = len(module.rows)
        again = model.predict(data[:30], batch_size=batch_size)  # type: ignore[arg-type]
    values = found["prediction"] if isinstance(found, dict) else found
    np.testing.assert_array_equal(values, np.arange(200.0))
    np.testing.assert_array_equal(again, np.arange(30.0))
    assert module.rows[0] in (64, 100)
    assert max(module.rows[3:halved]) < 24, "768 MiB hold fewer than 24 rows"
    assert max(module.rows[halved:]) < 24, "the size stays"


def test_one_row_that_does_not_fit_is_an_error() -> None:
    class Hungrier(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.empty(len(x), 1024 * MIB // 4)[:, :1].zero_()

    with address_space(512 * MIB), pytest.raises(RuntimeError, match=r"allocate memory|not enough memory"):
        tr.Model(Hungrier(), SIGNATURE).predict(pd.DataFrame({"a": [1.0, 2.0]}), on_error="column")


def test_a_found_size_does_not_change_the_numbers() -> None:
    model = tr.Model(nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1)), SIGNATURE)
    data = pd.DataFrame({"a": np.linspace(-1, 1, 5000)})
    np.testing.assert_allclose(model.predict(data, batch_size="auto"), model.predict(data), rtol=1e-6)


def test_small_batches_of_arrow_are_put_together() -> None:
    calls = CallState(10)
    arrow = [pa.array(range(count)) for count in (4, 4, 4, 25, 3)]
    assert [len(columns[0]) for columns in _gathered(iter(arrow), calls)] == [12, 25, 3]
    pairs = [(array, array) for array in arrow]
    (first, *_) = _gathered(iter(pairs), calls)
    assert first[1].to_pylist() == [0, 1, 2, 3] * 3


def test_what_a_batch_size_may_be() -> None:
    model = tr.Model(nn.Linear(1, 1), SIGNATURE)
    frame = pd.DataFrame({"a": [1.0]})
    assert len(TorchModel(model, batch_size="auto").transform(frame)) == 1
    with pytest.raises(BadSetting, match="batch_size='many': it must be a whole number of at least 1, or 'auto'"):
        model.predict(frame, batch_size="many")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="batch_size"):
        TorchModel(model, batch_size="many")


class TestComputing:
    """`precision` and `compile` of models of torch."""

    def model(self) -> tr.Model:
        torch.manual_seed(3)
        return tr.Model(nn.Sequential(nn.Linear(1, 64), nn.ReLU(), nn.Linear(64, 1)), SIGNATURE)

    @pytest.mark.parametrize("precision", ["bf16", "fp16"])
    def test_precision_is_that_of_the_products_and_weights_stay(self, precision: str) -> None:
        model, frame = self.model(), pd.DataFrame({"a": np.linspace(-3, 3, 50)})
        exact = TorchModel(model).predict(frame)
        rounded = TorchModel(model, precision=precision).predict(frame)
        assert 0 < np.abs(exact - rounded).max() < 0.05
        assert next(model.module.parameters()).dtype == torch.float32
        scored = TorchModel(model, precision=precision).transform(frame).prediction
        np.testing.assert_array_equal(scored, rounded)
        np.testing.assert_array_equal(model.predict(frame), exact)

    def test_a_module_is_compiled_once(self) -> None:
        model, frame = self.model(), pd.DataFrame({"a": np.linspace(-3, 3, 50)})
        compiled = TorchModel(model, compile=True)
        with pytest.MonkeyPatch.context() as patch:
            asked: list[object] = []
            patch.setattr(torch, "compile", lambda module: asked.append(module) or module)
            for _ in range(3):
                np.testing.assert_array_equal(compiled.predict(frame), model.predict(frame))
            assert asked == [model.module]
            model.module = other = nn.Linear(1, 1)
            compiled.predict(frame)
            assert asked[1:] == [other]

    def test_what_they_may_be(self) -> None:
        frame = pd.DataFrame({"a": [1.0]})
        with pytest.raises(BadSetting, match=r"precision='half' is unknown; choose one of 'fp32', 'bf16', 'fp16'"):
            TorchModel(self.model(), precision="half").transform(frame)
        function = tr.Model(lambda batch: batch["a"], example={"a": np.ones((2, 1), np.float32)})
        with pytest.raises(BadSetting, match="has no parameter 'compile'"):
            function.transform(frame, compile=True)
        with pytest.raises(BadSetting, match="are for models of torch, and this one is of function"):
            function.predict(frame, computes=Computing(compile=True))
