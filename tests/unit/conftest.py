"""The border of `make quick`: a test that starts ranks, or a process that imports torch, is marked `processes`."""

from __future__ import annotations

from typing import Any

import pytest

from tritium.gang.driver import local_processes


@pytest.fixture(autouse=True)
def _processes_are_marked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test that starts ranks and is not marked."""

    def refuse(*_: Any) -> None:
        pytest.fail("This test starts ranks: mark it @pytest.mark.processes, and `make quick` leaves it out.")

    if request.node.get_closest_marker("processes") is None:
        monkeypatch.setattr(local_processes, "ship_user_code", refuse)
