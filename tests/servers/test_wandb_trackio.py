"""One run of W&B and of trackio a gang, with the real packages: offline, and in a local store (`make trackers`)."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import tritium as tr

for package in ("wandb", "trackio"):
    pytest.importorskip(package, reason="`make trackers` installs it beside .venv")
pytestmark = pytest.mark.timeout(300)
FRAME = pd.DataFrame({"x": [0.1 * i for i in range(64)]})


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that launches two ranks of a driver with these variables."""
    for name, value in {"WANDB_MODE": "offline", "WANDB_PROJECT": "bikes", "TRACKIO_PROJECT": "bikes"}.items():
        monkeypatch.setenv(name, value)

    def start(train: Callable[[], None], env: Mapping[str, str] = {}, **options: Any) -> None:
        folders = {"WANDB_DIR": str(tmp_path), "TRACKIO_DIR": str(tmp_path / "trackio")}
        tr.launch(train, ranks=2, on="driver", env={**folders, **env}, progress=False, **options)

    return start


def wandb_runs(folder: Path) -> int:
    return len(list((folder / "wandb").glob("offline-run-*")))


def trackio_steps(folder: Path) -> list[tuple[str, int]]:
    """Return the run and the step of each log of the project."""
    with sqlite3.connect(folder / "trackio" / "bikes.db") as store:
        rows = store.execute("select run_name, step from metrics order by step").fetchall()
    store.close()
    return rows


def on_every_rank() -> None:
    import wandb

    with wandb.init() as run:
        run.log({"loss": 0.5})
        wandb.log({"rmse": 0.5})


def with_a_mode() -> None:
    import wandb

    with wandb.init(mode="offline", group="all", name=f"rank {tr.world().rank}") as run:
        run.log({"loss": 0.5})


@pytest.mark.parametrize(
    ("train", "env", "runs"),
    [(on_every_rank, {}, 1), (on_every_rank, {"WANDB_MODE": "offline"}, 2), (with_a_mode, {}, 2)],
)
def test_runs_of_wandb(
    train: Callable[[], None], env: Mapping[str, str], runs: int, launch: Callable[..., None], tmp_path: Path
) -> None:
    launch(train, env)
    assert wandb_runs(tmp_path) == runs


def test_rank_0_of_trackio(launch: Callable[..., None], tmp_path: Path) -> None:
    def train() -> None:
        import trackio

        if tr.world().rank == 0:
            trackio.init(project="bikes", name="tuesday", auto_log_cpu=False)
            for _ in range(3):
                trackio.log({"loss": 0.5})
            trackio.finish()

    launch(train)
    assert trackio_steps(tmp_path) == [("tuesday", step) for step in range(3)]


@pytest.mark.parametrize("tracker", ["wandb", "trackio"])
def test_trainer_of_hugging_face(tracker: str, launch: Callable[..., None], tmp_path: Path) -> None:
    def train() -> None:
        import transformers

        class Model(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = torch.nn.Parameter(torch.ones(()))

            def forward(self, x: Any) -> dict[str, Any]:
                return {"loss": (self.weight * x).mean() ** 2}

        settings = {"report_to": tracker, "save_strategy": "no", "logging_steps": 2, "use_cpu": True}
        names = {"project": "bikes", "run_name": "hub"}
        arguments = transformers.TrainingArguments(str(tmp_path / "out"), max_steps=4, **names, **settings)
        transformers.Trainer(Model(), arguments, train_dataset=tr.world().shard("train").dataset()).train()

    launch(train, framework="huggingface", data={"train": FRAME})
    if tracker == "wandb":
        assert wandb_runs(tmp_path) == 1
    else:
        assert {run for run, _ in trackio_steps(tmp_path)} == {"hub"}


def test_logger_of_lightning(launch: Callable[..., None], tmp_path: Path) -> None:
    def train() -> None:
        from lightning.pytorch.loggers import WandbLogger

        from lightning_logging import fit

        fit(WandbLogger(save_dir=str(tmp_path), offline=True), max_epochs=1)

    launch(train, framework="lightning", data={"train": FRAME})
    assert wandb_runs(tmp_path) == 1
