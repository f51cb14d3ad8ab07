"""`DeepspeedTorchDistributor`: what it refuses; where DeepSpeed is installed, what a script and a function get."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tritium.errors import BadSetting, TritiumError

HAS = importlib.util.find_spec("deepspeed") is not None


@pytest.fixture
def distributor() -> Any:
    return importlib.import_module("tritium.compat").DeepspeedTorchDistributor


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"numGpus": 0}, "numGpus=0 must be a whole number of at least 1."),
        ({"nnodes": 2}, "localMode=True runs on this machine alone, and nnodes=2."),
    ],
)
def test_wrong_arguments_are_refused(distributor: Any, given: dict[str, Any], says: str) -> None:
    with pytest.raises(BadSetting, match=says):
        distributor(**given)


@pytest.mark.skipif(HAS, reason="DeepSpeed is installed")
def test_where_deepspeed_is_not_installed_it_is_named(distributor: Any) -> None:
    with pytest.raises(TritiumError, match=r"DeepSpeed, which is not installed on .* -m pip install deepspeed"):
        distributor(2, useGpu=False).run(print)


@pytest.mark.timeout(300)
@pytest.mark.skipif(not HAS, reason="DeepSpeed is not installed")
def test_a_script_gets_deepspeeds_arguments(distributor: Any, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        f"import os, sys\nfile = open({str(tmp_path)!r} + '/' + os.environ['RANK'], 'w')\n"
        "file.write(' '.join(sys.argv[1:4]) + open(sys.argv[4]).read())\n"
    )
    distributor(2, useGpu=False, deepspeedConfig={"train_batch_size": 8}).run(str(script), 0.1)
    said = '0.1 --deepspeed --deepspeed_config{"train_batch_size": 8}'
    assert [(tmp_path / rank).read_text() for rank in "01"] == [said] * 2
