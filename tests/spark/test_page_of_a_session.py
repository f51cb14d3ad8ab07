"""`spark.tritium.ui=true`: the driver serves a page of each run of a session."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import clusters
import tritium as tr
from tritium.ui import server

pytestmark = pytest.mark.parametrize("cluster", ["local", "connect"], indirect=True)


@pytest.fixture(autouse=True)
def _stopped() -> Iterator[None]:
    yield
    server.stop()


@pytest.fixture
def launch(cluster: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Iterator[Any]:
    """Yield what launches a rank, and returns what it has shown."""

    def shown(**settings: Any) -> str:
        capfd.readouterr()
        run_dir = str(tmp_path / "run")
        assert tr.launch(lambda: 7, ranks=1, spark=cluster.spark, run_dir=run_dir, start_timeout=120, **settings) == [7]
        return capfd.readouterr().out

    with clusters.set_to(cluster.spark, **{"spark.tritium.ui": "true"}):
        yield shown


def test_the_runs_of_a_session_have_a_page(launch: Any) -> None:
    address = re.search(r"the page of this run: (\S+)", launch())
    assert address
    base, query, _ = re.split("[?#]", address[1])
    (row,) = httpx.get(f"{base}api/runs?{query}").json()
    assert row["status"] == "succeeded"


def test_a_run_may_say_otherwise(launch: Any) -> None:
    assert "the page of this run" not in launch(ui=False)


def test_a_setting_of_all_ends_no_run(launch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.importlib.util, "find_spec", lambda name: None)
    assert "spark.tritium.ui=true, and no page is served: The page needs starlette: pip install" in launch()
