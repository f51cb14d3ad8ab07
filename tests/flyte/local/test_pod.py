"""The command of a gang's pod, without a backend: what it writes for the backend to read."""

from __future__ import annotations

from pathlib import Path

import pytest

from pods import pod
from workflows import Place


@pytest.mark.timeout(900)
def test_a_gang_in_a_pod(tmp_path: Path) -> None:
    """Every rank runs, error.pb says what it is, and the report is there after the failure."""
    ended = pod(Place(tmp_path), "divides").run()
    assert ended.outputs is None, ended.log[-3000:]
    assert ended.error is not None, ended.log[-6000:]
    facts = {name: ended.error[name] for name in ("kind", "code", "origin")}
    assert facts == {"kind": "NON_RECOVERABLE", "code": "ZeroDivisionError", "origin": "USER"}
    assert "Its traceback (rank 1)" in ended.error["message"]
    assert "ZeroDivisionError" in ended.report
    assert "formed" in ended.report
