"""Which variables of trackers the ranks get: by a list, and keys only where their tracker is used."""

from __future__ import annotations

import os
from collections.abc import Mapping

import pytest

import tritium as tr
from tritium.gang.driver import trackers


@pytest.mark.parametrize(
    ("here", "sent"),
    [
        ({"MLFLOW_TRACKING_TOKEN": "a", "DATABRICKS_TOKEN": "b"}, ()),
        ({"MLFLOW_TRACKING_URI": "databricks", "DATABRICKS_TOKEN": "b", "MLFLOW_AUTH_ADMIN_PASSWORD": "c"}, (0, 1)),
        ({"HF_TOKEN": "a", "TRACKIO_PROJECT": "b"}, (1,)),
        ({"HF_TOKEN": "a", "TRACKIO_SPACE_ID": "b"}, (0, 1)),
        ({"WANDB_API_KEY": "a", "WANDB_DIR": "/tmp", "WANDB_SERVICE": "2-1-tcp"}, (0,)),
    ],
)
def test_sent(here: Mapping[str, str], sent: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(here))
    names = list(here)
    assert trackers.variables() == {names[i]: here[names[i]] for i in sent}


@pytest.mark.processes
def test_env_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "a")
    monkeypatch.setenv("WANDB_PROJECT", "bikes")

    def look() -> tuple[str, str]:
        return os.environ["WANDB_API_KEY"], os.environ["WANDB_PROJECT"]

    assert tr.launch(look, on="driver", env={"WANDB_API_KEY": ""}, progress=False) == [("", "bikes")]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("env", "modes"), [({}, ["online", "disabled"]), ({"WANDB_MODE": "offline"}, ["offline", "offline"])]
)
def test_ranks_above_0_begin_no_run_of_wandb(
    env: Mapping[str, str], modes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")

    def look() -> str:
        return os.environ["WANDB_MODE"]

    assert tr.launch(look, ranks=2, on="driver", env=env, progress=False) == modes
