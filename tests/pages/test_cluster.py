"""The page about clusters on a real one: from Python, by the page's own spark-submit, and through Connect."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import advice
import clusters

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tasks" / "cluster.md"
PROGRAM = "\n".join(code for _, code in advice.blocks(PAGE, "python"))
# The lines that the page has in place of the first one's session.
SESSIONS = [code.strip() for _, code in advice.blocks(PAGE, "py")]
HERE = 'SparkSession.builder.master("spark://host:7077").getOrCreate()'

pytestmark = pytest.mark.timeout(900)


def run(folder: Path, *command: str) -> str:
    """Run a command, whose session waits for its executors also on a busy machine, and return what it prints."""
    (folder / "conf").mkdir(exist_ok=True)
    (folder / "conf" / "spark-defaults.conf").write_text("spark.scheduler.maxRegisteredResourcesWaitingTime 200s\n")
    env = {**os.environ, "SPARK_CONF_DIR": str(folder / "conf")}
    ended = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def trained(printed: str) -> bool:
    """Return whether both ranks have looked at what there is, and the model is near."""
    python = sys.version.split()[0]
    error = float(re.search(r"Row\(.*=([\d.e-]+)\)", printed)[1])  # type: ignore[index]
    return printed.count(f"'{python}', '") == 2 and error < 0.5


def program(session: str) -> str:
    line = f"spark = {HERE}"
    assert line in PROGRAM
    return PROGRAM.replace(line, session)


def test_on_a_standalone_cluster(tmp_path: Path) -> None:
    with clusters.standalone() as url:
        script = tmp_path / "notebook.py"
        script.write_text(PROGRAM.replace("spark://host:7077", url))
        assert trained(run(tmp_path, sys.executable, script.name))

        submitted = next(code for _, code in advice.blocks(PAGE, "sh") if code.startswith("spark-submit"))
        command = submitted.replace("spark://host:7077", url).replace("/opt/training/bin/python", sys.executable)
        (tmp_path / "train.py").write_text(program(SESSIONS[0]))
        submit, *rest = shlex.split(command)
        assert trained(run(tmp_path, clusters.spark_script(submit), *rest))


def test_through_spark_connect(tmp_path: Path) -> None:
    with clusters.connect_server() as url:
        (tmp_path / "train.py").write_text(program(SESSIONS[1].replace("sc://host:15002", url)))
        assert trained(run(tmp_path, sys.executable, "train.py"))
