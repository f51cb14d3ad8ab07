"""Who may read what a run writes: it holds the user's code, and what ranks print."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tritium as tr
from tritium.checkpoint.code import plain
from tritium.ml.run_dirs import write_params


@pytest.fixture(autouse=True)
def _nothing_is_masked() -> Iterator[None]:
    """Let modes be those that the code asks for."""
    before = os.umask(0)
    yield
    os.umask(before)


def work() -> None:
    world = tr.world()
    world.store("reports/mine.bin", b"123")
    world.log(step=1, loss=0.5)
    world.checkpoint.save({"weights": np.ones(3)}, step=1)
    print("a line of the rank's")


def modes(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_mode & 0o777 for path in [folder, *folder.rglob("*")]}


def run(place: str, **settings: Any) -> dict[str, int]:
    tr.launch(work, run_dir=place, progress=False, output="none", **settings)
    write_params(place, {"epochs": 3}, plain)
    found = modes(Path(place.removeprefix("file://")))
    assert {"run.json", "events.jsonl", "report.json", "params.json", "reports/mine.bin", "checkpoints"} <= found.keys()
    return found


@pytest.mark.processes
@pytest.mark.parametrize("on", ["here", "driver"])
def test_a_run_directory_is_its_owners_alone(on: str, tmp_path: Path) -> None:
    found = run(str(tmp_path / "runs" / "1"), on=on)
    assert found["."] == found["checkpoints"] == found["reports"] == 0o700
    wrong = {name: oct(mode) for name, mode in found.items() if mode not in (0o700, 0o600)}
    assert not wrong
    assert (tmp_path / "runs").stat().st_mode & 0o777 == 0o777, "what is above may be others', too"


def test_a_directory_that_others_may_enter_stays_theirs(tmp_path: Path) -> None:
    """Where executors run as another user than the driver, both write there, and read what the other wrote."""
    place = tmp_path / "shared"
    place.mkdir(mode=0o770)
    found = run(str(place), on="here")
    assert found.pop(".") == 0o770
    assert set(found.values()) == {0o777, 0o666}


def test_a_url_of_a_local_directory(tmp_path: Path) -> None:
    assert run(f"file://{tmp_path}/run", on="here")["."] == 0o700
