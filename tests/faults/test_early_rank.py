"""A rank that is ready before its supervisor has reported."""

from __future__ import annotations

import select
from typing import Any

import pytest

import tritium as tr
from tritium.gang.supervisor import Supervisor


def test_what_a_rank_says_waits_for_its_supervisors_hello(monkeypatch: pytest.MonkeyPatch) -> None:
    hello = Supervisor._hello

    def late(self: Supervisor, *arguments: Any) -> None:
        """Says hello only when the rank has spoken already, as on a machine that is busy with other work."""
        assert select.select([self._to_rank._socket], [], [], 30.0)[0]
        hello(self, *arguments)

    monkeypatch.setattr(Supervisor, "_hello", late)
    assert tr.launch(lambda: tr.world().rank, ranks=2, on="driver") == [0, 1]
