"""`transform=`: the user's function on the inputs, the same in training, validation and prediction."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import tritium as tr
from tritium.errors import BadData, BadSetting, TrainingDiverged, UntrustedModel
from tritium.ml import TorchModel, fit

HERE: dict[str, Any] = {"on": "here", "progress": False, "output": "none", "verbose": False}
ROWS = 48
MEAN, SCALE = torch.tensor([1.0, 2.0, 3.0]), 0.5


def frame(rows: int = ROWS) -> pd.DataFrame:
    drawn = np.random.default_rng(2).normal(size=(rows, 3)).astype(np.float32) + np.arange(1, 4, dtype=np.float32)
    made = pd.DataFrame({f"x{i}": drawn[:, i] for i in range(3)})
    made["hour"] = np.arange(rows) % 24
    made["image"] = [bytes([i % 200]) * 6 for i in range(rows)]
    made["y"] = drawn[:, 0] - drawn[:, 1]
    return made


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def normalised(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return (inputs["features"] - MEAN) * SCALE


def noisy(inputs: dict[str, torch.Tensor], training: bool) -> dict[str, torch.Tensor]:
    """Draw from each of the three generators, in the steps of the training."""
    if not training:
        return inputs
    drawn = torch.rand(3).sum() + np.random.random() + random.random()
    return {name: value + drawn for name, value in inputs.items()}


def always_noisy(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return noisy(inputs, training=True)


SETTINGS: dict[str, Any] = {
    **HERE,
    "model": net,
    "loss": nn.MSELoss(),
    "optimizer": lambda p: torch.optim.SGD(p, 0.05),
    "feature_cols": ["x0", "x1", "x2"],
    "label_cols": ["y"],
    "batch_size": 16,
    "epochs": 2,
}


def weights(model: Any) -> list[torch.Tensor]:
    return [value.detach().clone() for value in model.module.parameters()]


def same(one: Any, other: Any) -> bool:
    return all(mine.equal(theirs) for mine, theirs in zip(weights(one), weights(other), strict=True))


class TestTraining:
    def test_as_if_the_columns_were_so(self) -> None:
        rows = frame().assign(validate=np.arange(ROWS) % 3 == 0)
        by_hand = rows.assign(**{f"x{i}": (rows[f"x{i}"] - MEAN[i].item()) * SCALE for i in range(3)})
        given = fit(rows, **SETTINGS, transform=normalised, validation="validate")
        expected = fit(by_hand, **SETTINGS, validation="validate")
        for mine, theirs in zip(weights(given), weights(expected), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
        for name in ("loss", "validation_loss"):
            assert given.history[-1][name] == pytest.approx(expected.history[-1][name], rel=1e-4)
        np.testing.assert_allclose(given.predict(rows), expected.predict(by_hand), rtol=1e-4, atol=1e-5)
        assert given.signature == expected.signature, "prediction reads the columns before the transform"

    def test_only_the_steps_of_the_training_are_training(self) -> None:
        def blank(inputs: Any, training: bool) -> Any:
            return inputs["features"] * (0 if training else 1)

        settings = SETTINGS | {"model": lambda: nn.Linear(3, 1)}
        start = fit(frame(), **settings | {"optimizer": lambda p: torch.optim.SGD(p, 0.0)})
        model = fit(frame(), **settings, transform=blank)
        assert model.module.weight.equal(start.module.weight), "of zeros no weight has a gradient"
        assert not model.module.bias.equal(start.module.bias)
        assert len(set(model.predict(frame()))) > 1
        checked = fit(frame(), **settings, transform=blank, validation=frame())
        x = torch.tensor(frame()[["x0", "x1", "x2"]].to_numpy())
        y = torch.tensor(frame()["y"].to_numpy())[:, None]
        loss = nn.functional.mse_loss(checked.module(x), y).item()
        assert checked.history[-1]["validation_loss"] == pytest.approx(loss, rel=1e-4)

    def test_inputs_are_added_and_left_out(self) -> None:
        class Parts(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.last = nn.Linear(5, 1)

            def forward(self, x: torch.Tensor, clock: torch.Tensor) -> torch.Tensor:
                return self.last(torch.cat([x, clock], 1))

        def clock(inputs: Any) -> Any:
            angle = inputs["hour"] * (2 * torch.pi / 24)
            return {"x": inputs["x"], "clock": torch.stack([angle.sin(), angle.cos()], 1)}

        columns = {"x": ["x0", "x1", "x2"], "hour": "hour"}
        model = fit(frame(), **SETTINGS | {"feature_cols": columns, "model": Parts}, transform=clock)
        assert [i.name for i in model.signature.inputs] == ["x", "hour"]
        angle = frame()["hour"].to_numpy() * (2 * np.pi / 24)
        by_hand = np.column_stack([frame()[["x0", "x1", "x2"]], np.sin(angle), np.cos(angle)]).astype(np.float32)
        found = model.module.last(torch.tensor(by_hand)).detach().numpy()[:, 0]
        np.testing.assert_allclose(model.predict(frame()), found, rtol=1e-4, atol=1e-5)

        def one(inputs: Any) -> Any:
            return {"all": torch.cat([inputs["x"], inputs["hour"][:, None]], 1)}

        alone = fit(frame(), **SETTINGS | {"feature_cols": columns, "model": lambda: nn.Linear(4, 1)}, transform=one)
        assert alone.predict(frame()).shape == (ROWS,)

    def test_a_step_of_ones_own_gets_what_it_makes(self) -> None:
        def step(module: Any, batch: Any) -> Any:
            assert batch.rows == len(batch["features"]) == len(batch["label"])
            return nn.functional.mse_loss(module(batch["features"]), batch["label"])

        own = fit(frame(), **SETTINGS | {"loss": None}, train_step=step, transform=normalised)
        plain = fit(frame(), **SETTINGS, transform=normalised)
        assert same(own, plain)

        def asks(module: Any, batch: Any) -> Any:
            return nn.functional.mse_loss(module(batch["x"]), batch["label"])

        with pytest.raises(BadSetting, match=r"asks for batch\['x'\], and a batch has 'features', 'label'"):
            fit(frame(), **SETTINGS | {"loss": None}, train_step=asks, transform=normalised)

    def test_one_that_writes_over_its_inputs(self) -> None:
        def in_place(inputs: Any) -> Any:
            inputs["features"].sub_(MEAN).mul_(SCALE)
            return inputs

        model = fit(frame(), **SETTINGS, transform=in_place)
        assert same(model, fit(frame(), **SETTINGS, transform=normalised))
        rows = frame()[["x0", "x1", "x2"]].to_numpy()
        np.testing.assert_array_equal(model.predict(rows), model.predict(rows))

    def test_a_loss_that_it_makes_infinite_is_told(self) -> None:
        with pytest.raises(TrainingDiverged, match="Look at what transform= makes of them"):
            fit(frame(), **SETTINGS, transform=lambda inputs: (inputs["features"] - 3).log())


class TestRandomNumbers:
    def test_they_are_decided_by_the_seed(self) -> None:
        assert same(*(fit(frame(), **SETTINGS, transform=noisy) for _ in range(2)))
        assert not same(fit(frame(), **SETTINGS, transform=noisy), fit(frame(), **SETTINGS))

    @pytest.mark.parametrize("transform", [noisy, always_noisy])
    def test_a_training_that_continues_draws_the_same(self, transform: Any, tmp_path: Path) -> None:
        """Of an image the shape is not known before, so that the output is tried after the first step, each time."""
        images = {
            "feature_cols": "image",
            "decode": {"image": lambda content: np.frombuffer(content, np.uint8)[:3].astype(np.float32) / 255},
        }
        whole = fit(frame(), **SETTINGS | images | {"epochs": 4}, transform=transform, run_dir=str(tmp_path / "a"))
        fit(frame(), **SETTINGS | images, transform=transform, run_dir=str(tmp_path / "b"))
        again = fit(frame(), **SETTINGS | images | {"epochs": 4}, transform=transform, run_dir=str(tmp_path / "b"))
        assert len(again.history) == 4
        assert same(whole, again)

    def test_another_one_is_another_training(self, tmp_path: Path) -> None:
        fit(frame(), **SETTINGS, transform=normalised, run_dir=str(tmp_path))
        with pytest.raises(BadSetting, match="transform: noisy, was normalised"):
            fit(frame(), **SETTINGS | {"epochs": 3}, transform=noisy, run_dir=str(tmp_path))


@pytest.mark.parametrize(
    ("transform", "error", "message"),
    [
        pytest.param("x - 1", BadSetting, "transform='x - 1' is not a function", id="text"),
        pytest.param(nn.Identity, BadSetting, "transform=Identity is a class; give an instance", id="class"),
        pytest.param(lambda: 0, BadSetting, r"takes nothing; it is called with \(inputs\)", id="no-arguments"),
        pytest.param(
            lambda x, train: 0, BadSetting, r"takes x, train; it is called with \(inputs\)", id="other-argument"
        ),
        pytest.param(lambda x: [1], BadSetting, "returned a value of type list; it must .*, or one tensor", id="list"),
        pytest.param(lambda x: None, BadSetting, "returned None; it must return a mapping", id="none"),
        pytest.param(lambda x: {}, BadSetting, "returned {}; it must return a mapping", id="nothing"),
        pytest.param(lambda x: {"x": 1}, BadSetting, "returned a value of type int for 'x'; it must", id="number"),
        pytest.param(
            lambda x: x["features"].mean(0),
            BadSetting,
            r"'features' with the shape \[3\] for a batch of 2 rows",
            id="rows",
        ),
        pytest.param(
            lambda x: {"x": x["features"], "label": x["features"]},
            BadSetting,
            "returned 'label', as a batch calls another column",
            id="label",
        ),
        pytest.param(
            lambda x: {"x": x["features"], "z": x["features"]},
            BadSetting,
            "returned 'x', 'z', and the module's forward, which gets them by keyword, can't take these: .*'input'",
            id="names",
        ),
        pytest.param(
            lambda x: x["featurs"],
            BadData,
            r"can't take these features: KeyError: 'featurs'\n.*\n  - features \[batch, 3\] float32 of columns 'x0'",
            id="fails",
        ),
        pytest.param(
            lambda x: x["features"][:, :2],
            BadData,
            r"forward can't take these .*\n.*\n  - features \[batch, 2\] float32 of transform=<lambda>",
            id="shape",
        ),
    ],
)
def test_what_it_may_not_be_or_return(transform: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        fit(frame(), **SETTINGS, transform=transform)


def test_what_it_returns_is_checked_where_only_the_first_row_shows_the_shape() -> None:
    def to_floats(content: bytes) -> Any:
        return np.frombuffer(content, np.uint8)[:3].astype(np.float32)

    with pytest.raises(BadSetting, match=r"with the shape \[3\] for a batch of 2 rows"):
        fit(
            frame(),
            **SETTINGS | {"feature_cols": "image", "decode": {"image": to_floats}},
            transform=lambda x: x["features"].mean(0),
        )


class TestPrediction:
    @pytest.mark.usefixtures("saved_elsewhere")
    def test_saved_by_name_and_by_value(self, tmp_path: Path) -> None:
        model = fit(frame(), **SETTINGS | {"model": net}, transform=normalised)
        found = model.predict(frame())
        np.testing.assert_array_equal(TorchModel(model).transform(frame())["prediction"], found)
        model.save(str(tmp_path / "named"))
        name = f"{normalised.__module__}:normalised"
        trusted = [f"{net.__module__}:net"]
        with pytest.raises(UntrustedModel, match=rf"transforms its inputs by the function '{name}'"):
            tr.load(str(tmp_path / "named"), trusted=trusted)
        again = tr.load(str(tmp_path / "named"), trusted=[*trusted, name])
        assert again.input_transform is normalised
        np.testing.assert_array_equal(again.predict(frame()), found)
        model.input_transform = lambda inputs: normalised(inputs)
        model.save(str(tmp_path / "value"))
        with pytest.raises(UntrustedModel, match="transforms its inputs by a function by value"):
            tr.load(str(tmp_path / "value"), trusted=trusted)
        np.testing.assert_array_equal(tr.load(str(tmp_path / "value"), trusted=True).predict(frame()), found)

    def test_a_model_that_was_made_by_hand(self) -> None:
        rows = frame()[["x0", "x1", "x2"]]
        module = net()
        model = tr.Model(module, example=rows, transform=normalised)
        by_hand = module((torch.tensor(rows.to_numpy()) - MEAN) * SCALE).detach().numpy()[:, 0]
        np.testing.assert_allclose(model.predict(rows), by_hand, rtol=1e-4, atol=1e-6)
        model.input_transform = None
        assert not np.allclose(model.predict(rows), by_hand)
        example = {"features": rows.to_numpy(), "y": np.zeros(ROWS)}
        with pytest.raises(BadSetting, match="Name those that it is called with"):
            tr.Model(module, example=example, transform=normalised)
        named = tr.Model(module, example=example, inputs="features", transform=normalised)
        np.testing.assert_allclose(named.predict(rows.to_numpy()), by_hand, rtol=1e-4, atol=1e-6)

    def test_weights_that_it_holds_are_not_trained(self) -> None:
        frozen = nn.Linear(3, 3)
        model = fit(frame(), **SETTINGS, transform=lambda inputs: frozen(inputs["features"]))
        assert all(parameter.grad is None for parameter in frozen.parameters())
        assert model.predict(frame()).shape == (ROWS,)


@pytest.mark.processes
def test_two_ranks_learn_what_one_does() -> None:
    settings = {name: value for name, value in SETTINGS.items() if name != "batch_size"}
    settings |= {"on": "driver", "global_batch_size": 16, "shuffle": False, "transform": normalised}
    one, two = (fit(frame(), **settings, ranks=ranks) for ranks in (1, 2))
    assert one.history[-1]["loss"] == pytest.approx(two.history[-1]["loss"], rel=1e-4)
    np.testing.assert_allclose(two.predict(frame()), one.predict(frame()), rtol=1e-4, atol=1e-5)


def as_it_is(graph: Any, inputs: Any) -> Any:
    """Compile nothing."""
    return graph.forward


@pytest.mark.processes
@pytest.mark.timeout(200)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_together_with_what_else_changes_a_step(strategy: str) -> None:
    """Compiled, in float16, and with DDP's options: on two ranks as on one, and as in prediction."""
    both = {"transform": normalised, "precision": "fp16", "clip_grad_norm": 1.0, "shuffle": False, "strategy": strategy}
    ddp = {"compile": {"backend": as_it_is}, "ddp_options": {"bucket_cap_mb": 1, "static_graph": True}}
    settings = SETTINGS | both | (ddp if strategy == "ddp" else {})
    one = fit(frame(), **settings)
    two = fit(frame(), **settings | {"on": "driver", "ranks": 2, "batch_size": 8})
    assert [e["loss"] for e in two.history] == pytest.approx([e["loss"] for e in one.history], rel=1e-2)
    np.testing.assert_allclose(two.predict(frame()), one.predict(frame()), rtol=2e-2, atol=2e-3)
