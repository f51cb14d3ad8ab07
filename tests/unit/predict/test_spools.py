"""What a killed driver has left for its workers is removed by the next one; what others still need stays."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tritium import file_system
from tritium.predict.following import remove_abandoned
from tritium.predict.lock import Lock

TAKES = """
import sys
from tritium.predict.lock import Lock
lock = Lock(sys.argv[1])
print(lock.take(), flush=True)
sys.stdin.read()
"""


def test_the_spool_of_a_killed_driver_is_removed(tmp_path: Path) -> None:
    for name in ("killed", "alive", "connect", "beginning"):
        tmp_path.joinpath(name).mkdir()
        tmp_path.joinpath(name, "1").touch()
    tmp_path.joinpath("beginning", "lock").touch()
    driver = subprocess.Popen(
        [sys.executable, "-c", TAKES, str(tmp_path / "killed")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == b"None\n"
        remove_abandoned(str(tmp_path))
        assert tmp_path.joinpath("killed").exists()
        driver.kill()
    alive = Lock(str(tmp_path / "alive"))
    assert alive.take() is None
    try:
        remove_abandoned(str(tmp_path))
    finally:
        alive.release()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alive", "beginning", "connect"]


@pytest.mark.parametrize("lease", [0.0, 60.0])
def test_on_a_store_it_is_removed_when_its_lease_has_ended(tmp_path: Path, lease: float) -> None:
    spools = f"memory:/{tmp_path}"
    assert Lock(f"{spools}/one", lease).take() is None
    remove_abandoned(spools)
    store, root = file_system.opened(spools)
    assert store.exists(f"{root}/one/lock") == (lease > 0)
    if lease:
        store.rm(root, recursive=True)
