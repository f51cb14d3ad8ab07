"""A fit in a used run directory: the same training continues, another one is refused before anything starts."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn
from torch.nn import functional

import tritium as tr
from tritium.checkpoint.code import code_of
from tritium.checkpoint.format import REPLICATED, order
from tritium.checkpoint.state import Snapshot
from tritium.checkpoint.store import Store
from tritium.errors import BadSetting
from tritium.gang.settings import Gang
from tritium.ml import Callback, EarlyStopping, LightningSettings, fit, fitting
from tritium.ml.lightning.backend import LightningBackend

SCALE = 2.0


@pytest.fixture(scope="module", autouse=True)
def _scale() -> Iterator[None]:
    before = SCALE
    yield
    globals()["SCALE"] = before


def table() -> pa.Table:
    x = np.random.default_rng(1).normal(size=(30, 3))
    return pa.table({f"x{i}": x[:, i] for i in range(3)} | {"y": x[:, 0] - x[:, 1]})


class Net(nn.Module):
    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Dropout(dropout), nn.Linear(4, 1))

    def forward(self, x: Any) -> Any:
        return self.layers(x)


class OtherNet(nn.Module):
    """The same layers, and another function of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.1), nn.Linear(4, 1))

    def forward(self, x: Any) -> Any:
        return self.layers(x).tanh()


OtherNet.__name__ = OtherNet.__qualname__ = "Net"


class Scaled(nn.Module):
    """A module with a setting that its text does not show."""

    def __init__(self, scale: float, **more: Any) -> None:
        super().__init__()
        self.scale, self.more = scale, more
        self.layer = nn.Linear(3, 1)

    def forward(self, x: Any) -> Any:
        return self.layer(x * self.scale)


def grouped(lr: float) -> Callable[..., Any]:
    def make(parameters: Any) -> torch.optim.Optimizer:
        first, *rest = parameters
        return torch.optim.AdamW([{"params": [first], "lr": lr}, {"params": rest}], 0.01)

    return make


def squared(output: Any, label: Any) -> Any:
    return ((output - label) ** 2).mean()


def scaled(by: float) -> Callable[..., Any]:
    return lambda output, label: by * functional.mse_loss(output, label)


def by_global(output: Any, label: Any) -> Any:
    return SCALE * functional.mse_loss(output, label)


def step(module: Any, batch: Any) -> Any:
    output = module(batch["features"])
    return functional.mse_loss(output, batch["label"]), output


def longer_step(module: Any, batch: Any) -> Any:
    output = module(batch["features"])
    return functional.mse_loss(output, batch["label"]) + 0.1 * output.square().mean(), output


def error(output: Any, label: Any) -> Any:
    return (output - label).abs().mean()


def twice(output: Any, label: Any) -> Any:
    return 2 * (output - label).abs().mean()


class Custom(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Changed(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["lr"] *= 0.9
        return super().step(closure)


Changed.__name__ = Changed.__qualname__ = "Custom"


def train(run_dir: Path, **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "model": Net,
        "loss": nn.MSELoss(),
        "optimizer": lambda p: torch.optim.Adam(p, 0.01),
        "feature_cols": ["x0", "x1", "x2"],
        "label_cols": ["y"],
        "batch_size": 8,
        "epochs": 1,
        "verbose": False,
        "ranks": 1,
        "on": "here",
        "progress": False,
    }
    return fit(table(), run_dir=str(run_dir), **(settings | changes))


def trained(run_dir: Path, **changes: Any) -> list[Any]:
    return [p.tolist() for p in train(run_dir, **changes).module.parameters()]


def zero(output: Any, label: Any) -> float:
    return 0.0


def first_note(run_dir: Path) -> str:
    return str(json.loads((run_dir / "report.json").read_text())["notes"][0])


adam, sgd = torch.optim.Adam, torch.optim.SGD
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "learning rate": ({}, {"optimizer": lambda p: adam(p, 0.02)}, "optimizer group 0 lr: 0.02, was 0.01"),
    "weight decay": (
        {"optimizer": lambda p: sgd(p, 0.1)},
        {"optimizer": lambda p: sgd(p, 0.1, weight_decay=0.5)},
        "optimizer group 0 weight_decay: 0.5, was 0",
    ),
    "betas": (
        {},
        {"optimizer": lambda p: adam(p, 0.01, betas=(0.8, 0.999))},
        r"group 0 betas: \[0.8, 0.999\], was \[0.9, 0.999\]",
    ),
    "learning rate of a group": (
        {"optimizer": grouped(0.1)},
        {"optimizer": grouped(0.2)},
        "optimizer group 0 lr: 0.2, was 0.1",
    ),
    "optimizer's own code": (
        {"optimizer": lambda p: Custom(p, 0.1)},
        {"optimizer": lambda p: Changed(p, 0.1)},
        "optimizer: Custom has changed",
    ),
    "loss": ({}, {"loss": nn.L1Loss()}, r"loss: L1Loss\(reduction='mean'\), was MSELoss\(reduction='mean'\)"),
    "settings of a loss": (
        {"loss": nn.HuberLoss()},
        {"loss": nn.HuberLoss(delta=0.5)},
        r"loss: HuberLoss\(.*delta=0.5\), was HuberLoss\(.*delta=1.0\)",
    ),
    "weights of a loss": (
        {"loss": nn.BCEWithLogitsLoss(pos_weight=torch.ones(1)), "task": "regression"},
        {"loss": nn.BCEWithLogitsLoss(pos_weight=torch.full((1,), 3.0)), "task": "regression"},
        "loss: BCEWithLogitsLoss.* has changed",
    ),
    "arguments of a partial": (
        {"loss": functools.partial(functional.smooth_l1_loss, beta=1.0)},
        {"loss": functools.partial(functional.smooth_l1_loss, beta=0.5)},
        r"loss: partial\(smooth_l1_loss, beta=0.5\), was partial\(smooth_l1_loss, beta=1.0\)",
    ),
    "a loss of one's own": ({"loss": squared}, {"loss": by_global}, "loss: by_global, was squared"),
    "what a loss captures": ({"loss": scaled(1.0)}, {"loss": scaled(3.0)}, "loss: <lambda> has changed, or what it c"),
    "a layer's setting": (
        {},
        {"model": lambda: Net(0.5)},
        r"model: \(1\): Dropout\(p=0.5, inplace=False\), was \(1\): Dropout\(p=0.1, inplace=False\)",
    ),
    "the forward of a model": ({}, {"model": OtherNet}, "model: Net has changed"),
    "an attribute of a model": (
        {"model": lambda: Scaled(1.0)},
        {"model": lambda: Scaled(5.0)},
        "model: Scaled holds other settings",
    ),
    "an attribute of a model that is given": ({"model": Scaled(1.0)}, {"model": Scaled(5.0)}, "model: Scaled holds o"),
    "train_step": (
        {"train_step": step, "loss": None},
        {"train_step": longer_step, "loss": None},
        "train_step: longer_step, was step",
    ),
    "a scheduler": (
        {"lr_scheduler": lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5)},
        {"lr_scheduler": lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.1)},
        "lr_scheduler: <lambda> has changed",
    ),
    "no scheduler": (
        {"lr_scheduler": lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5)},
        {},
        "lr_scheduler: None, was <lambda>",
    ),
    "metrics": ({"metrics": {"e": error}}, {"metrics": {"e": twice}}, "metrics: {'e': twice}, was {'e': error}"),
    "rows to validate on": ({"validation": 0.2}, {"validation": 0.3}, "validation: 0.3, was 0.2"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_training_is_refused_with_what_is_different(change: str, tmp_path: Path) -> None:
    before, now, says = CHANGES[change]
    train(tmp_path, **before)
    events = (tmp_path / "events.jsonl").read_bytes()
    with pytest.raises(BadSetting, match=says) as caught:
        train(tmp_path, **(before | now if "no scheduler" not in change else now))
    assert len(caught.value.differences) == 1
    assert (tmp_path / "events.jsonl").read_bytes() == events, "nothing has started"
    train(tmp_path, **before)
    assert "nothing is left to do" in first_note(tmp_path)


def test_a_global_that_code_reads_is_part_of_it(tmp_path: Path) -> None:
    train(tmp_path, loss=by_global)
    globals()["SCALE"] = 5.0
    with pytest.raises(BadSetting, match="loss: by_global has changed, or what it captures"):
        train(tmp_path, loss=by_global)
    model = train(tmp_path, loss=by_global, if_code_changed="continue", epochs=2)
    assert len(model.history) == 2
    assert "continues: epoch 2 of 2" in first_note(tmp_path)
    assert first_note(tmp_path).endswith("; loss: by_global has changed, or what it captures")


def test_everything_that_is_different_is_listed_at_once(tmp_path: Path) -> None:
    train(tmp_path)
    with pytest.raises(BadSetting) as caught:
        train(tmp_path, optimizer=lambda p: adam(p, 0.5), loss=nn.L1Loss(), batch_size=4)
    assert len(caught.value.differences) == 3
    assert "if_code_changed='continue'" in str(caught.value)
    with pytest.raises(BadSetting, match="optimizer group 0 lr") as caught:
        train(tmp_path, optimizer=lambda p: adam(p, 0.5), if_code_changed="continue")
    assert "if_code_changed" not in str(caught.value), "a learning rate is no code"


def teacher() -> Callable[..., Any]:
    """Return a function that captures a network of new random weights, and the name of a run."""
    net, name = nn.Linear(1, 1), os.urandom(4).hex()

    def loss(output: Any, label: Any) -> Any:
        assert name
        return functional.mse_loss(output, label) + 0 * net(output).mean()

    return loss


def test_what_can_only_be_guessed_is_told(tmp_path: Path) -> None:
    train(tmp_path, loss=teacher())
    train(tmp_path, loss=teacher())
    line = first_note(tmp_path)
    assert "nothing is left to do" in line
    assert line.endswith("; whether loss, with all that it calls and captures, is the same can't be known")


def test_initial_weights_of_a_model_that_is_given_can_only_be_guessed(tmp_path: Path) -> None:
    train(tmp_path / "given", model=Scaled(1.0))
    train(tmp_path / "given", model=Scaled(1.0))
    line = first_note(tmp_path / "given")
    assert "nothing is left to do" in line
    assert line.endswith(
        "; the model begins with other weights, or holds other objects: whether it is the same can't be known"
    )
    train(tmp_path / "made", model=lambda: Scaled(1.0, names={"b", "a"}))
    torch.manual_seed(77)
    train(tmp_path / "made", model=lambda: Scaled(1.0, names={"b", "a"}))
    assert first_note(tmp_path / "made").endswith("its model is returned"), "the seed decides the weights"


def test_a_training_goes_on_with_another_scheduler_for_other_epochs_and_says_so(tmp_path: Path) -> None:
    train(tmp_path, lr_scheduler=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 1), metrics={"e": error})
    model = train(
        tmp_path,
        lr_scheduler=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 4),
        metrics={"e": error, "t": twice},
        epochs=4,
    )
    rates = [entry["learning_rate"] for entry in model.history[1:]]
    assert rates == pytest.approx([0.01 * (1 + np.cos(np.pi * k / 4)) / 2 for k in (1, 2, 3)])
    assert "t" in model.history[-1]
    assert "lr_scheduler: <lambda> has changed" in first_note(tmp_path)
    assert "metrics: " in first_note(tmp_path)


ONE = """
def loss(output, label, weight=(1, 2.5)):
    "Doc."
    kinds = {"a", "b", "c"}
    total = (output - label).abs()  # of every row
    return helper(total, kinds).mean()

def helper(value, names, *, by=BY):
    return sorted(scaled(value) * by for name in names if name in {"x", "y", "z"})

def scaled(value):
    return value * 3
"""
REWRITTEN = '''


def loss(output, label, weight=(1, 2.5)):
    """Another
    docstring."""
    kinds = {"a", "b", "c"}
    total = (
        output - label
    ).abs()
    return helper(total, kinds).mean()

def helper(value, names, *, by=BY):
    # a comment
    return sorted(scaled(value) * by for name in names if name in {"x", "y", "z"})

def scaled(value): return value * 3
'''


def made(source: str, file: str | Path = "<cell>", by: float = 2.0) -> Any:
    """Return the function `loss` of a source, which a file has; "<cell>": nobody has it."""
    space: dict[str, Any] = {"BY": by, "__name__": "__main__"}
    if isinstance(file, Path):
        file.write_text(source)
    exec(compile(source, str(file), "exec"), space)
    return space["loss"]


def test_comments_lines_and_docstrings_do_not_count(tmp_path: Path) -> None:
    one = code_of(made(ONE, tmp_path / "one.py"))
    assert one.known
    assert code_of(made(REWRITTEN, tmp_path / "two.py")) == one
    changes = (("2.5", "2"), (".abs()", ".exp()"), ('"z"', '"w"'), ("output - label", "label - output"))
    for number, change in enumerate(changes):
        other = code_of(made(ONE.replace(*change), tmp_path / f"{number}.py"))
        assert other.exact != one.exact, change
    other = code_of(made(ONE, tmp_path / "by.py", by=3.0))
    assert other.exact != one.exact, "a default of a function that it calls"
    far = code_of(made(ONE.replace("value * 3", "value * 4"), tmp_path / "far.py"))
    assert far.exact == one.exact
    assert far.loose != one.loose, "a function that a function calls which it calls"


def test_without_source_names_and_numbers_count_and_nothing_else_is_known() -> None:
    one = code_of(made(ONE))
    assert not one.known
    assert code_of(made(REWRITTEN)).exact == one.exact
    assert code_of(made(ONE.replace("output - label", "label - output"))).exact == one.exact
    for change in ((".abs()", ".exp()"), ("BY", "BY * 2 + 7")):
        assert code_of(made(ONE.replace(*change))).exact != one.exact, change


def test_lambdas_of_one_line_are_told_apart(tmp_path: Path) -> None:
    file = tmp_path / "one.py"
    pair = made("loss = [lambda a, b: a - b, lambda a, b: b - a]", file)
    lambdas = [code_of(function) for function in pair]
    assert len({code.exact for code in lambdas}) == 2 or sys.version_info < (3, 11)
    assert all(code.known == (sys.version_info >= (3, 11)) for code in lambdas)


def test_a_helper_of_a_helper_that_has_changed_is_told(tmp_path: Path) -> None:
    source = """
def scaled(value):
    return value * 3

def distance(output, label):
    return scaled((output - label) ** 2)

def loss(output, label):
    return distance(output, label).mean()
"""
    file, run_dir = tmp_path / "module.py", tmp_path / "run"
    train(run_dir, loss=made(source, file))
    train(run_dir, loss=made(source.replace("value * 3", "value * 4"), file))
    line = first_note(run_dir)
    assert "nothing is left to do" in line
    assert line.endswith("; whether loss, with all that it calls and captures, is the same can't be known")
    with pytest.raises(BadSetting, match="loss: loss has changed, or what it captures"):
        train(run_dir, loss=made(source.replace("** 2", "** 4"), file))


SCRIPT = """
import dataclasses, enum, functools, sys
import numpy as np, torch
from torch import nn
from torch.nn import functional
from tritium.checkpoint.code import code_of
from tritium.ml.torch.identity import opened

Kind = enum.Enum("Kind", "a b")

@dataclasses.dataclass
class Config:
    names: frozenset
    sizes: dict

class Net(nn.Module):
    width = 3
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 2)
    def forward(self, x):
        return super().forward(x) if x in {"a", "b", "c"} else self.first(x)

class Task:
    def __init__(self):
        self.net, self.names = Net(), {"u", "v", "w"}
    def step(self, module, batch):
        return module(batch) * CONFIG.sizes["k"]

CONFIG = Config(frozenset("abcdef"), {"k": 1, "j": {2.0, 3.5}})
torch.manual_seed(1)
task, array = Task(), np.arange(5)
def closed():
    seen = {"p", "q", "r"}
    return lambda x: recursive(x) if x in seen else array
def recursive(x):
    return recursive(x - 1) if x else Kind.a
things = [Net, Net(), task.step, closed(), recursive, functools.partial(functional.mse_loss, reduction="sum"),
          nn.CrossEntropyLoss(torch.tensor([1.0, 2.0])), CONFIG, {"m": functional.l1_loss}, torch.optim.Adam, len]
for thing in things:
    print(code_of(thing, opened))
"""


@pytest.mark.processes
def test_digests_are_those_of_a_fresh_interpreter_whatever_its_hash_seed(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(SCRIPT)
    (tmp_path / "two.py").write_text("# other lines\n\n" + SCRIPT)
    started = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / name)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for name, seed in (("one.py", "1"), ("two.py", "77"))
    ]
    outputs = [process.communicate(timeout=120)[0] for process in started]
    assert outputs[0] == outputs[1]
    lines = outputs[0].splitlines()
    assert len(lines) == 11
    assert len(set(lines)) == 11


OLD: dict[str, Any] = {
    "identity": {"batch_size": 8, "optimizer": "Adam"},
    "identity_with_code": {
        "batch_size": 8,
        "optimizer": "Adam",
        "validation": None,
        "code": {"loss": {"text": "MSELoss(reduction='mean')", "value": "0a1b", "code": "2c3d", "guess": "4e5f"}},
        "architecture": "Net()",
        "versions": {"Python": "3.11", "torch": "2.9"},
    },
    "weights": {"module": {}, "optimizer": {}, "best": {}},
    "early_stopping": {"rule": None, "best": None, "waited": 0, "weights": {}},
    "epochs": 1,
    "history": [],
    "finished": False,
    "stopped": False,
}
"""The state in a checkpoint of a training as it was before its parts had names, in form 1."""


@pytest.mark.parametrize("way", ["peek", "load"])
def test_a_checkpoint_of_an_earlier_form_is_refused_by_name(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(str(tmp_path))
    name = store.prepare(4)
    store.commit(name, 1, store.write(name, REPLICATED, Snapshot().take(OLD, "state")))
    if way == "load":  # as where the driver can't read the directory
        monkeypatch.setattr(fitting, "peek", lambda *_: None)
    with pytest.raises(BadSetting, match="another version of Tritium") as caught:
        train(tmp_path)
    assert caught.value.differences == ["form: 2, was 1"]
    assert "000000000004 was saved by another version of Tritium" in str(caught.value)
    assert store.names() == [name], "it is left as it is"


class Fitted(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: Any) -> Any:
        return self.layer(x)

    def training_step(self, batch: Any, number: int) -> Any:
        return functional.mse_loss(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return sgd(self.parameters(), 0.1)


@pytest.mark.parametrize("way", ["peek", "load"])
def test_a_checkpoint_of_another_framework_is_refused_by_name(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path)
    if way == "load":
        monkeypatch.setattr(fitting, "peek", lambda *_: None)
    settings = LightningSettings(
        model=Fitted, feature_cols=["x0", "x1", "x2"], label_cols=["y"], batch_size=8, verbose=False
    )
    gang = Gang(ranks=1, on="here", run_dir=str(tmp_path), progress=False)
    with pytest.raises(BadSetting, match="is a checkpoint of a training with torch, and this one is with lightning"):
        fitting.run(fitting.prepare(LightningBackend(), table(), settings, gang))


def test_early_stopping_of_another_rule_gives_back_no_weights_of_before(tmp_path: Path) -> None:
    """By the metric that is always 0 the first epoch is the best, for ever."""
    always = {"metrics": {"zero": zero}}
    rule = EarlyStopping(patience=5, monitor="zero")
    whole = trained(tmp_path / "whole", epochs=6, **always)
    train(tmp_path / "removed", epochs=3, early_stopping=rule, **always)
    assert trained(tmp_path / "removed", epochs=6, **always) == whole
    for name, changed in {
        "monitor": EarlyStopping(patience=5),
        "mode": EarlyStopping(patience=5, monitor="zero", mode="max"),
        "restore_best": EarlyStopping(patience=5, monitor="zero", restore_best=False),
    }.items():
        train(tmp_path / name, epochs=3, early_stopping=rule, **always)
        first = trained(tmp_path / f"first {name}", epochs=1, **always)
        assert trained(tmp_path / name, epochs=6, early_stopping=changed, **always) != first, name
        assert "early stopping looks for the best epoch from epoch 4 on: its rule was another one" in str(
            json.loads((tmp_path / name / "report.json").read_text())["notes"]
        )
    train(tmp_path / "same", epochs=3, early_stopping=rule, **always)
    longer = dataclasses.replace(rule, patience=9)
    assert trained(tmp_path / "same", epochs=6, early_stopping=longer, **always) == trained(
        tmp_path / "one", epochs=1, **always
    )


def test_what_early_stopping_has_ended_stays_so_only_by_the_same_rule(tmp_path: Path) -> None:
    rule = EarlyStopping(patience=1, monitor="zero")
    changes: dict[str, tuple[Any, int]] = {
        "same": (rule, 2),
        "longer": (EarlyStopping(patience=3, monitor="zero"), 4),
        "other": (EarlyStopping(patience=1, monitor="loss"), 6),
        "none": (None, 6),
    }
    for name, (now, epochs) in changes.items():
        train(tmp_path / name, epochs=4, metrics={"zero": zero}, early_stopping=rule)
        model = train(tmp_path / name, epochs=6, metrics={"zero": zero}, early_stopping=now)
        assert len(model.history) == epochs, name
        said = "nothing is left to do" if name == "same" else "continues: epoch 3 of 6"
        assert said in first_note(tmp_path / name)


class StopsAtOnce(Callback):
    def on_epoch_end(self, state: Any) -> None:
        state.stop = True


def test_what_a_callback_has_ended_stays_so_without_early_stopping(tmp_path: Path) -> None:
    train(tmp_path, epochs=4, callbacks=[StopsAtOnce()], early_stopping=3)
    assert len(train(tmp_path, epochs=6).history) == 1
    assert "nothing is left to do" in first_note(tmp_path)


class Grows(Callback):
    """Does after an epoch what the coordinator does once Spark has slots for more ranks."""

    def on_epoch_end(self, state: Any) -> None:
        control = tr.world().checkpoint._control
        control.elastic = control.could_be_more = True


@pytest.mark.parametrize("grows", [False, True])
def test_as_many_checkpoints_stay_as_were_asked_for(grows: bool, tmp_path: Path) -> None:
    train(tmp_path, epochs=2, checkpoint_every=1, checkpoint_keep=10, callbacks=[Grows()] if grows else [])
    steps = [order(name)[0] for name in Store(str(tmp_path)).names()]
    assert steps == [8, 7, 6, 5, 4, 3, 2, 1]  # two epochs of 30 rows in batches of 8
