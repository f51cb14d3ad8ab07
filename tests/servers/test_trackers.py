"""Ranks log to the driver's run on a real MLflow server, and runs of Tritium become runs of MLflow."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
import pandas as pd
import pytest
import torch
from mlflow import MlflowClient
from mlflow.entities import Run

import tritium as tr
import tritium.mlflow
from mlflow_server import answering
from tritium.errors import RankFailed
from tritium.ml import fit

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning:mlflow"),
    pytest.mark.timeout(400),
]
SECRET = "planted-and-to-be-seen-nowhere"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowClient]:
    """Yield a client of a real server, with a password that it does not ask for."""
    folder, before = tmp_path_factory.mktemp("mlflow"), dict(os.environ)
    os.environ |= {
        "MLFLOW_TRACKING_USERNAME": "somebody",
        "MLFLOW_TRACKING_PASSWORD": SECRET,
        "WANDB_API_KEY": SECRET,
    }
    database, artifacts = f"sqlite:///{folder}/store.db", str(folder / "artifacts")
    server = ["server", "--backend-store-uri", database, "--artifacts-destination", artifacts]
    with answering(server, "/health", folder) as url:
        mlflow.set_tracking_uri(url)
        yield MlflowClient()
        mlflow.set_tracking_uri(None)
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def runs(client: MlflowClient, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Yield a function that gives all runs of the test's own experiment, the oldest first."""
    monkeypatch.delenv("_MLFLOW_TELEMETRY_SESSION_ID", raising=False)  # MLflow removes it while it works.
    experiment = mlflow.set_experiment(request.node.name).experiment_id

    def of_the_test() -> list[Run]:
        return list(client.search_runs([experiment], order_by=["attributes.start_time ASC"]))

    yield of_the_test
    os.environ.pop("MLFLOW_EXPERIMENT_ID")  # set_experiment has set it.


def values(client: MlflowClient, run: Run, name: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, name)]


def written(run_dir: Path) -> str:
    return "".join(path.read_text() for path in run_dir.rglob("*") if path.is_file())


def test_a_rank_logs_to_the_run_of_the_driver(client: MlflowClient, runs: Any, tmp_path: Path) -> None:
    def train() -> tuple[str, str]:
        import mlflow

        if tr.world().rank == 0:
            for step in range(3):
                mlflow.log_metric("loss", 1 / (1 + step), step=step)
        print("trained")
        return os.environ["MLFLOW_TRACKING_PASSWORD"], os.environ["WANDB_API_KEY"]

    with mlflow.start_run():
        results = tr.launch(train, ranks=2, on="driver", run_dir=str(tmp_path / "run"), progress=False)
        mlflow.log_metric("after", 1.0)
    assert results == [(SECRET, SECRET)] * 2
    (run,) = runs()
    assert run.info.status == "FINISHED"
    assert values(client, run, "loss") == [(0, 1.0), (1, 0.5), (2, 1 / 3)]
    assert run.data.metrics["after"] == 1.0
    assert "trained" in written(tmp_path / "run")
    assert SECRET not in written(tmp_path / "run")


def test_runs_are_tracked(client: MlflowClient, runs: Any, tmp_path: Path) -> None:
    def train(fails: bool) -> None:
        world = tr.world()
        for epoch in range(2):
            for step in range(2):
                world.log(epoch=epoch, step=step, steps=2, loss=epoch + step / 2 + 100 * world.rank)
        if fails and world.rank == 1:
            raise ValueError("no more bikes")

    where: dict[str, Any] = {"on": "driver", "ranks": 2, "progress": False, "retries": 0}
    with tritium.mlflow.tracked():
        tr.launch(train, args=(False,), run_dir=str(tmp_path / "good"), env={"TOKEN": SECRET}, **where)
        with mlflow.start_run() as parent, pytest.raises(RankFailed):
            tr.launch(train, args=(True,), run_dir=str(tmp_path / "bad"), **where)
    tr.launch(train, args=(False,), run_dir=str(tmp_path / "outside"), **where)
    good, outer, bad = runs()
    assert (good.info.status, bad.info.status) == ("FINISHED", "FAILED")
    assert outer.info.run_id == parent.info.run_id
    assert values(client, good, "loss") == [(0, 0.0), (1, 0.5), (2, 1.0), (3, 1.5)]
    assert [value for _, value in values(client, good, "epoch")] == [0.0, 0.0, 1.0, 1.0]
    assert good.data.params["ranks"] == "2"
    assert good.data.params["env"] == "['TOKEN']"
    assert good.data.tags["tritium.run_dir"] == str(tmp_path / "good")
    assert "no more bikes" in mlflow.artifacts.load_text(f"{bad.info.artifact_uri}/report.html")
    assert SECRET not in repr(good.to_dictionary())


def test_an_estimator_is_tracked(client: MlflowClient, runs: Any, tmp_path: Path) -> None:
    frame = pd.DataFrame({"x": [0.1 * i for i in range(40)], "y": [0.2 * i for i in range(40)]})
    with mlflow.start_run() as parent, tritium.mlflow.tracked():
        for epochs in (2, 3):
            model = fit(
                frame,
                model=torch.nn.Linear(1, 1),
                loss=torch.nn.MSELoss(),
                optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
                epochs=epochs,
                feature_cols=["x"],
                label_cols=["y"],
                ranks=2,
                on="driver",
                progress=False,
                run_dir=str(tmp_path / str(epochs)),
            )
    whole, first, second = runs()
    assert whole.info.run_id == parent.info.run_id
    for run, epochs in ((first, 2), (second, 3)):
        assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert run.data.params.items() >= {"epochs": str(epochs), "loss": "MSELoss", "ranks": "2"}.items()
        assert [value for _, value in values(client, run, "epoch")][-1] == epochs - 1
    assert second.data.metrics["loss"] == model.history[-1]["loss"]


def test_trainer_of_hugging_face(client: MlflowClient, runs: Any, tmp_path: Path) -> None:
    def train() -> None:
        import transformers

        class Model(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = torch.nn.Parameter(torch.ones(()))

            def forward(self, x: Any) -> dict[str, Any]:
                return {"loss": (self.weight * x).mean() ** 2}

        settings = {"report_to": "mlflow", "save_strategy": "no", "logging_steps": 2, "use_cpu": True}
        arguments = transformers.TrainingArguments(str(tmp_path), max_steps=4, **settings)
        transformers.Trainer(Model(), arguments, train_dataset=tr.world().shard("train").dataset()).train()

    frame = pd.DataFrame({"x": [0.1 * i for i in range(64)]})
    with mlflow.start_run():
        tr.launch(train, ranks=2, on="driver", framework="huggingface", data={"train": frame}, progress=False)
    (run,) = runs()
    assert [step for step, _ in values(client, run, "loss")] == [2, 4]
    assert run.data.params["max_steps"] == "4"


def test_logger_of_lightning(client: MlflowClient, runs: Any, tmp_path: Path) -> None:
    def train() -> None:
        from lightning.pytorch.loggers import MLFlowLogger

        from lightning_logging import fit

        fit(MLFlowLogger(run_id=os.environ["MLFLOW_RUN_ID"]), max_epochs=2, log_every_n_steps=1)

    frame = pd.DataFrame({"x": [0.1 * i for i in range(64)]})
    with mlflow.start_run():
        tr.launch(train, ranks=2, on="driver", framework="lightning", data={"train": frame}, progress=False)
    (run,) = runs()
    assert [step for step, _ in values(client, run, "loss")] == [0, 1, 2, 3]
