"""`import tritium.compat`: old names for what is here, wherever the real packages are not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ALONE = """
import sys
{before}
import tritium.compat
{after}
"""


def python(before: str, after: str) -> str:
    """Return what a Python of its own prints."""
    code = ALONE.format(before=before, after=after)
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120).stdout


def test_importing_it_imports_nothing_else() -> None:
    found = python("", "print({'torch', 'pyspark', 'horovod'} & set(sys.modules), tritium.compat.status())")
    names = ("horovod", "petastorm", "sparkdl", "spark_tensorflow_distributor", "tensorflowonspark")
    assert found == f"set() { ({name: f'tritium_compat.{name}' for name in names}) }\n"


def test_the_module_has_two_names_and_is_one() -> None:
    after = """
import horovod.torch as old
import tritium.compat.horovod.torch as new
import horovod
print(old is new, horovod.torch is new, new.__spec__.name, old.allreduce.__module__)
from horovod.torch.mpi_ops import allreduce, synchronize
print(allreduce is new.allreduce, synchronize is new.synchronize)
import importlib, importlib.util
print(importlib.util.find_spec("horovod.mxnet"))
importlib.reload(new)
try:
    import horovod.mxnet
except ModuleNotFoundError as error:
    print(error)
"""
    assert python("", after).splitlines() == [
        "True True tritium_compat.horovod.torch tritium_compat.horovod.torch.autograd",
        "True True",
        "None",
        "No module named 'horovod.mxnet'",
    ]


def test_where_it_is_not_installed_it_says_how_to_get_it() -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        python("sys.modules['tritium_compat'] = None", "")
    last = caught.value.stderr.splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: tritium.compat is in a distribution of its own")
    assert last.endswith('pip install "tritium[compat]".')
    command = "import sys; sys.modules['tritium_compat'] = None; from tritium.cli import main; main()"
    run = subprocess.run(
        [sys.executable, "-c", command, "run", "--compat", "--ranks", "1", "x.py"], capture_output=True, text=True
    )
    assert run.returncode == 1
    assert "Error: TritiumError: --compat: tritium.compat is in a distribution of its own" in run.stderr


def test_a_folder_of_that_name_is_no_package(tmp_path: Path) -> None:
    (tmp_path / "petastorm").mkdir()
    before = f"sys.path.insert(0, {str(tmp_path)!r})\nimport warnings\nwarnings.simplefilter('error')"
    assert python(before, "import petastorm; print(petastorm.__name__)") == "tritium_compat.petastorm\n"


def test_an_installed_package_comes_first(tmp_path: Path) -> None:
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text("real = True\n")
    before = f"sys.path.append({str(tmp_path)!r})"
    after = "import horovod; print(horovod.real, tritium.compat.status()['horovod'])"
    assert python(before, after) == f"True installed: {tmp_path}/horovod/__init__.py\n"
    with pytest.raises(subprocess.CalledProcessError) as caught:
        python(f"{before}\nimport warnings\nwarnings.simplefilter('error')", after)
    text = caught.value.stderr
    assert f"tritium.compat leaves installed packages as they are: horovod ({tmp_path}/horovod/__init__.py)" in text


@pytest.mark.parametrize("framework", [None, "torch", "horovod"], ids=["none", "torch", "horovod"])
def test_old_code_runs_in_the_ranks(framework: str | None) -> None:
    after = f"""
import warnings
warnings.simplefilter("error")
import tritium as tr

def main():
    import horovod.torch as hvd
    import torch

    hvd.init()
    return hvd.allreduce(torch.tensor([float(hvd.rank())]), op=hvd.Sum).item()

found = tr.launch(main, ranks=3, on="driver", framework={framework!r}, progress=False, output="none", retries=0)
print(found)
"""
    assert python("", after) == "[3.0, 3.0, 3.0]\n"


def test_without_it_there_is_no_such_module() -> None:
    code = """
import tritium as tr

def main():
    import horovod.torch

try:
    tr.launch(main, ranks=2, on="driver", progress=False, output="none", retries=0)
except tr.errors.TritiumError as error:
    print(error)
"""
    run: Any = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120)
    assert "No module named 'horovod'" in run.stdout


def test_a_script_for_horovodrun(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import horovod.torch as hvd\nimport torch\nhvd.init()\n"
        "total = hvd.allreduce(torch.ones(1), op=hvd.Sum)\n"
        "if hvd.rank() == 0:\n    print('total', total.item())\n"
    )
    command = [sys.executable, "-c", "from tritium.cli import main; main()", "run", "--ranks", "2"]
    run = subprocess.run([*command, "--compat", str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert "total 2.0" in run.stdout + run.stderr
    run = subprocess.run([*command, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert run.returncode == 1
    assert "No module named 'horovod'" in run.stdout + run.stderr
