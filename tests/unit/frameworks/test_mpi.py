"""mpi4py in a gang of another framework: a world of one in every rank is an error rather than a result."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

import tritium as tr
from tritium.errors import BadSetting

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="needs mpi4py: pip install tritium[mpi]"),
]


def run(fn: Any, ranks: int = 2, **settings: Any) -> list[Any]:
    return tr.launch(fn, ranks=ranks, on="driver", progress=False, output="none", retries=0, **settings)


def test_importing_mpi_in_a_gang_of_several_is_an_error_that_says_what_to_use() -> None:
    def train() -> int:
        from mpi4py import MPI

        return int(MPI.COMM_WORLD.Get_size())

    with pytest.raises(
        BadSetting, match=r'a gang of 2 ranks.*MPI\.COMM_WORLD.*framework="mpi".*torch\.distributed'
    ) as caught:
        run(train)
    assert caught.value.rank in (0, 1)


@pytest.mark.parametrize("line", ["from mpi4py import MPI", "import mpi4py.MPI", "import mpi4py.util.pkl5"])
def test_a_library_that_imports_mpi_and_goes_on_without_it_does_not_hide_that(line: str, tmp_path: Path) -> None:
    library = f"try:\n    {line}\nexcept ImportError:\n    MPI = None\nsize = 1\n"
    Path(tmp_path, "logs_with_mpi.py").write_text(library)

    def train() -> int:
        import logs_with_mpi  # type: ignore[import-not-found]

        return int(logs_with_mpi.size)

    with pytest.raises(BadSetting, match="a gang of 2 ranks"):
        run(train, env={"PYTHONPATH": str(tmp_path)})


def test_mpi_that_was_imported_before_the_gang_had_formed_is_the_same_error(tmp_path: Path) -> None:
    Path(tmp_path, "sitecustomize.py").write_text("from mpi4py import MPI\n")
    with pytest.raises(BadSetting, match="a gang of 2 ranks"):
        run(lambda: 1, env={"PYTHONPATH": str(tmp_path)})


def test_whether_mpi4py_is_there_may_be_asked() -> None:
    def train() -> tuple[bool, bool, bool]:
        import importlib.util

        import mpi4py

        found = importlib.util.find_spec("mpi4py") is not None, importlib.util.find_spec("mpi4py.MPI") is not None
        return *found, bool(mpi4py.get_config() is not None)

    assert run(train) == [(True, True, True)] * 2


def test_one_rank_may_use_it() -> None:
    def train() -> int:
        from mpi4py import MPI

        return int(MPI.COMM_WORLD.allreduce(3))

    assert run(train, ranks=1) == [3]
