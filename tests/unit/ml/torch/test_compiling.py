"""`compile`: what is compiled, what is refused, and that the model that is returned is not compiled."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn

from tritium.errors import BadSetting
from tritium.ml import fit
from tritium.ml.torch.compiling import compile_in_place, try_compile, uncompiled

HERE: dict[str, Any] = {"on": "here", "progress": False, "output": "none", "verbose": False}


def table() -> pa.Table:
    x = np.random.default_rng(2).normal(size=(50, 3))
    return pa.table({f"x{i}": x[:, i] for i in range(3)} | {"y": x[:, 0] - x[:, 1]})


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.1), nn.Tanh(), nn.Linear(4, 1))


GOOD: dict[str, Any] = {
    "model": net,
    "loss": nn.MSELoss(),
    "optimizer": lambda p: torch.optim.SGD(p, 0.05),
    "feature_cols": ["x0", "x1", "x2"],
    "label_cols": ["y"],
    "batch_size": 16,  # and a last batch of two rows
    "epochs": 2,
}


class Graphs:
    """A backend of torch.compile that runs graphs as they are, and remembers their inputs' shapes."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.seen.append([list(value.shape) for value in inputs if isinstance(value, torch.Tensor)])
        return graph.forward


def own_step(module: Any, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(module(batch["features"]), batch["label"])


@pytest.mark.parametrize("own", [False, True])
def test_a_compiled_training_gives_the_same_model_and_one_that_is_not_compiled(own: bool) -> None:
    steps = {"train_step": own_step, "loss": None} if own else {}
    plain = fit(table(), **GOOD | HERE | steps, validation=0.2)
    graphs = Graphs()
    model = fit(table(), **GOOD | HERE | steps, validation=0.2, compile={"backend": graphs})
    assert 2 <= len(graphs.seen) <= 6, "training, validation, and their smaller batches once each"
    assert [e["loss"] for e in model.history] == pytest.approx([e["loss"] for e in plain.history])
    assert [e["validation_loss"] for e in model.history] == pytest.approx([e["validation_loss"] for e in plain.history])
    assert model.module._compiled_call_impl is None
    assert list(model.module.state_dict()) == list(plain.module.state_dict())
    again = pickle.loads(pickle.dumps(model.module))
    for mine, theirs in zip(again.parameters(), plain.module.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_several_trainings_in_a_process_are_all_compiled() -> None:
    for _ in range(10):  # torch gives up on a function after 8 recompilations
        graphs = Graphs()
        fit(table(), **GOOD | HERE | {"epochs": 1}, compile={"backend": graphs, "dynamic": True})
        assert graphs.seen


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("reduce-overhead", "compile='reduce-overhead' must be True, False, or a mapping"),
        (None, "compile=None must be True, False"),
        ({"modes": "default"}, r"compile has no option 'modes'\. Did you mean 'mode'"),
        ({"mode": 1}, "mode'] is 1, and must be a name"),
        ({"backend": 1}, "backend'] is 1, and must be a name or a function"),
        ({"dynamic": "yes"}, "dynamic'] is 'yes', and must be True, False or None"),
        ({"mode": "default", "options": {"trace.enabled": True}}, "takes mode or options, not both"),
        ({"backend": "inductr"}, r"torch\.compile does not take compile=.*inductr"),
        ({"mode": "reduce-overheads"}, r"torch\.compile does not take compile=.*reduce-overheads"),
    ],
)
def test_what_is_wrong(given: Any, message: str) -> None:
    with pytest.raises(BadSetting, match=message):
        fit(table(), **GOOD | HERE, compile=given)


def test_a_module_that_is_compiled_already() -> None:
    compiled = torch.compile(net(), backend="eager")
    with pytest.raises(BadSetting, match=r"model is a module of torch\.compile.*with compile=True"):
        fit(table(), **GOOD | HERE | {"model": compiled})
    with pytest.raises(BadSetting, match=r"returned a module of torch\.compile.*with compile=True"):
        fit(table(), **GOOD | HERE | {"model": lambda: torch.compile(net(), backend="eager")})


def test_a_trial_leaves_the_module_and_a_single_call_is_not_compiled() -> None:
    module, graphs = net(), Graphs()
    try_compile(module, {"backend": graphs})
    assert module._compiled_call_impl is None
    compile_in_place(module, {"backend": graphs}, torch.device("cpu"))
    with uncompiled(module):
        module(torch.zeros(2, 3))
    assert not graphs.seen
    module(torch.zeros(2, 3))
    assert graphs.seen


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder, exc

    def none() -> str:
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
    with pytest.raises(BadSetting, match=r"needs a C\+\+ compiler on every executor.*Install g\+\+"):
        fit(table(), **GOOD | HERE, compile=True)


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_two_ranks_with_the_compiler_of_torch(tmp_path: Path) -> None:
    changes = {"on": "driver", "ranks": 2, "batch_size": 8, "model": lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh())}
    changes |= {"train_step": lambda module, batch: (module(batch["features"]) - batch["label"]).square().mean()}
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    settings = GOOD | HERE | changes | {"loss": None}
    rows = table().slice(0, 48)  # Batches of one size: another one is compiled for 7 s.
    plain = fit(rows, **settings)
    model = fit(rows, **settings, compile=True, env=env)
    assert list(tmp_path.rglob("*.so")), "nothing was compiled"
    assert [e["loss"] for e in model.history] == pytest.approx([e["loss"] for e in plain.history], rel=1e-5)


def test_a_compiled_training_continues(tmp_path: Path) -> None:
    compiled = {"compile": {"backend": Graphs()}}
    settings = GOOD | HERE | compiled | {"checkpoint_every": 1, "run_dir": str(tmp_path)}
    fit(table(), **settings | {"epochs": 1})
    continued = fit(table(), **settings)
    whole = fit(table(), **GOOD | HERE | compiled)
    for name, value in whole.module.state_dict().items():
        torch.testing.assert_close(continued.module.state_dict()[name], value, rtol=0, atol=0)
    assert [entry["loss"] for entry in continued.history] == [entry["loss"] for entry in whole.history]
