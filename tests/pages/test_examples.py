"""Every example of a framework runs, as a user would start it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from . import in_turn

ROOT = Path(__file__).resolve().parents[2] / "examples"
ESTIMATORS = ("keras_digits.py", "jax_diabetes.py", "lightning_cancer.py")
EXAMPLES = [
    *sorted(ROOT.joinpath("frameworks").glob("*.py")),
    *(ROOT / name for name in ESTIMATORS),
]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[in_turn.Programs]:
    own = ("PYSPARK_PYTHON", "PYTHONPATH")  # an example sets the first, and imports what is installed: tests/lean
    environment = {name: value for name, value in os.environ.items() if name not in own}
    programs = in_turn.Programs(tmp_path_factory.mktemp("examples"), environment)
    yield programs
    programs.close()


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_it_runs(path: Path, programs: in_turn.Programs, tmp_path: Path) -> None:
    if path.stem.startswith("horovod") and find_spec("horovod") is None:
        pytest.skip("horovod is not installed: make horovod")
    programs.run(path, tmp_path)
