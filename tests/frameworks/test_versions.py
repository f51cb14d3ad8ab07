"""A framework that has another version on another host is said before the function is called."""

from __future__ import annotations

import contextlib
from pathlib import Path

from machines import Machine, order_for, serving
from tritium.errors import WrongVersion
from tritium.frameworks.torch import Torch


def fail() -> None:
    raise AssertionError("the function was called")


def package(place: Path, text: str) -> str:
    """Make a package `torch` of this content, which is found before the real one; return its directory."""
    (place / "torch").mkdir(parents=True)
    (place / "torch" / "__init__.py").write_text(text)
    return str(place)


def test_another_version_on_another_host_is_an_error_of_all_ranks(tmp_path: Path) -> None:
    with serving(2) as coordinator, contextlib.ExitStack() as stack:
        for partition, version in enumerate(("2.9.1", "2.13.0")):
            path = package(tmp_path / version, f"__version__ = {version!r}\n")
            order = order_for(coordinator, fail, framework=Torch())
            stack.callback(Machine(order, partition, inside=("env", f"PYTHONPATH={path}")).close)
        with coordinator.changed:
            assert coordinator.changed.wait_for(lambda: coordinator.failure is not None, 30)
        assert coordinator.failure is not None
        error = coordinator.failure.error()
    assert isinstance(error, WrongVersion)
    assert "Ranks have different versions of torch: rank 0 on " in str(error)
    assert " has 2.9.1, rank 1 on " in str(error)
    assert " has 2.13.0. Install the same one on every host: pip install torch==2.9.1" in str(error)
