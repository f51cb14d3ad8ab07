"""The record of a scoring: parts come back as they were, and one process at a time has it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tritium.errors import BadSetting
from tritium.predict.ledger import Ledger, Part
from tritium.predict.lock import Lock


@pytest.mark.parametrize("url", ["{}/ledger", "memory://ledger-of-a-test/{}"])
def test_parts_come_back(tmp_path: Path, url: str) -> None:
    ledger = Ledger(url.format(tmp_path))
    with ledger.locked():
        assert ledger.run() is None
        ledger.begin({"into": "here"})
        begun, done = Part(3, 2), Part(0, 3, fingerprint=(7, 1 << 60, 2), output={"files": ["a"]})
        for part in (begun, done):
            ledger.record(part)
        assert Ledger(url.format(tmp_path)).parts() == [done, begun]
        ledger.forget(begun)
        assert ledger.parts() == [done]
        assert ledger.run() == {"into": "here"}


@pytest.mark.parametrize("url", ["{}/ledger", "memory://lock-of-a-test/{}"])
def test_it_is_locked(tmp_path: Path, url: str) -> None:
    other = Ledger(url.format(tmp_path))
    with Ledger(url.format(tmp_path)).locked(), pytest.raises(BadSetting, match="in use by another"), other.locked():
        pass
    with other.locked():
        pass


def test_a_lease_that_nobody_renews_ends(tmp_path: Path) -> None:
    directory = f"memory://lease-of-a-test/{tmp_path}"
    assert Lock(directory).take() is None
    with pytest.raises(BadSetting, match="its lock ends after 60 s"), Ledger(directory).locked():
        pass
    ended = f"memory://ended-of-a-test/{tmp_path}"
    assert Lock(ended, lease=0.0).take() is None
    with Ledger(ended).locked():
        assert "pid" in str(Lock(ended).take())
