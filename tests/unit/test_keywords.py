"""Editors, type checkers and notebooks see every setting where it is given as a keyword."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tritium as tr
from tritium.ml import TorchEstimator, TorchSettings, fit

ROOT = Path(__file__).parents[2]
RIGHT = """
import tritium as tr
from tritium.ml import TorchEstimator, TorchSettings, fit

def make(*_: object) -> None: ...

gang = tr.Gang(ranks=2, retries=0)
tr.launch(make, gang, ranks=(1, 2), env={"A": "b"}, on="driver")
est = TorchEstimator(model=make, optimizer=make, feature_cols=["a"], label_cols="b", epochs=3, ranks=2, gang=gang)
est.setBatchSize(8).setRanks(2).getEpochs()
fit(None, model=make, optimizer=make, feature_cols=["a"], label_cols="b", batch_size=4, on="here")
TorchSettings(model=make, optimizer=make, feature_cols=["a"], label_cols="b", batch_size=3)
print(est.batch_size.name)
"""
WRONG = {
    "tr.Gang(rank=2)": "rank",
    "tr.launch(make, rank=2)": "rank",
    "tr.submit(make, rank=2)": "rank",
    'tr.launch(make, on="drivr")': "drivr",
    "tr.launch(make, retries='2')": "retries",
    "TorchEstimator(epoch=3)": "epoch",
    "TorchEstimator(num_ranks=3)": "num_ranks",
    "fit(None, batchsize=4)": "batchsize",
    "TorchSettings(model=make, optimizer=make, feature_cols=['a'], label_cols='b', epoch=3)": "epoch",
    "est.setBatchsize(3)": "setBatchsize",
}


def test_what_checkers_read_is_what_the_dataclasses_say() -> None:
    """`make keywords` writes it."""
    for path, text in runpy.run_path(str(ROOT / "scripts" / "keywords.py"))["stubs"]().items():
        assert ast.dump(ast.parse(path.read_text(encoding="utf-8"))) == ast.dump(ast.parse(text)), path


@pytest.mark.timeout(600)
def test_a_type_checker_finds_a_misspelt_setting_and_nothing_else(tmp_path: Path) -> None:
    head = len(RIGHT.splitlines())
    page = tmp_path / "page.py"
    page.write_text(RIGHT + "\n".join(WRONG) + "\n")
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), str(page)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=500)
    said = [line for line in run.stdout.splitlines() if ": error:" in line]
    by_line = {int(line.split(":")[1]): line for line in said}
    assert sorted(by_line) == list(range(head + 1, head + 1 + len(WRONG))), run.stdout + run.stderr
    for number, (code, word) in enumerate(WRONG.items(), head + 1):
        assert word in by_line[number], code


@pytest.mark.parametrize(
    ("function", "sources"),
    [
        (tr.launch, (tr.Gang,)),
        (tr.submit, (tr.Gang,)),
        (fit, (TorchSettings, tr.Gang)),
        (TorchEstimator, (TorchSettings, tr.Gang)),
        (TorchEstimator.__init__, (TorchSettings, tr.Gang)),
    ],
)
def test_a_notebook_shows_the_settings_with_their_defaults(function: Any, sources: tuple[type, ...]) -> None:
    shown = inspect.signature(function).parameters
    assert not any(p.kind is p.VAR_KEYWORD for p in shown.values())
    for field in (field for source in sources for field in dataclasses.fields(source)):
        assert shown[field.name].kind is inspect.Parameter.KEYWORD_ONLY
        if field.default is not dataclasses.MISSING:
            assert shown[field.name].default == field.default
    assert "gang" in shown
