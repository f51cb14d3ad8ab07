"""What `tritium doctor` finds on this machine, and how a finding is shown (driver)."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tritium.errors import TritiumError
from tritium.spark import python as worker_python

_JAVA = (
    "Debian: sudo apt-get install openjdk-17-jre-headless; macOS: brew install --cask temurin@17; "
    "conda: conda install -c conda-forge openjdk=17"
)
# Matches metadata such as `pandas<3,>=2.2; extra == "spark"`.
_RULE = re.compile(r"([\w-]+)[^>]*>=([\d.]+)(?:.*extra == .(\w+))?")


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    subject: str
    result: str
    fix: str = ""
    """The remedy; "" if nothing is wrong."""
    warning: bool = False
    """Whether what is wrong lets ranks run all the same."""

    @property
    def level(self) -> str:
        """Return "ok", "warning" or "error"."""
        return "ok" if not self.fix else "warning" if self.warning else "error"


def show(findings: Sequence[Finding]) -> None:
    """Print the findings as a table."""
    from rich.console import Console
    from rich.table import Table

    marks = {"ok": "[green]✓", "warning": "[yellow]![/]", "error": "[red]✗"}
    table = Table(box=None, show_header=False, pad_edge=False)
    for finding in findings:
        table.add_row(marks[finding.level], *map(_escaped, (finding.subject, finding.result, finding.fix)))
    Console().print(table)


def _escaped(text: str) -> str:
    from rich.markup import escape  # A fix such as tritium[torch] is no markup.

    return escape(text)


def machine() -> list[Finding]:
    """Check this machine, and start a gang of two ranks on it where the rest is well."""
    libraries = map(library, ("pyspark", "pandas", "pyarrow", "numpy", "torch"))
    findings = [python(), workers(), java(), *libraries, gpus(), scratch()]
    return findings if any(finding.fix for finding in findings) else [*findings, gang()]


def python() -> Finding:
    """Report the Python that runs this; an older one could not have started."""
    return Finding("Python", f"{sys.version.split()[0]}, {sys.executable}")


def workers() -> Finding:
    """Check the Python of Spark's workers on this machine: PYSPARK_PYTHON, or this one for Tritium's own tasks."""
    chosen = os.environ.get(worker_python.VARIABLE)
    if chosen is None:
        other = shutil.which("python3") or "no python3"
        same = worker_python.is_drivers_own("python3")
        note = "" if same else f"; UDFs of your own run {other}, unless PYSPARK_PYTHON={sys.executable}"
        return Finding("Spark's Python", f"this one, on a local master{note}")
    try:
        worker_python.check(chosen)
    except TritiumError as error:
        return Finding("Spark's Python", chosen, str(error))
    return Finding("Spark's Python", f"{chosen} (PYSPARK_PYTHON)")


def java() -> Finding:
    """Check the Java that Spark will start: that of JAVA_HOME, else of the PATH."""
    home = os.environ.get("JAVA_HOME")
    program = os.path.join(home, "bin", "java") if home else "java"
    place = shutil.which(program)
    if place is None:
        return Finding("Java", f"no {program}", _JAVA)
    answer = subprocess.run([place, "-version"], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    version = re.search(r'version "(?:1\.)?(\d+)[^"]*"', answer.stderr + answer.stdout)
    if version is None:
        return Finding("Java", f"{place} says no version", _JAVA)
    return Finding("Java", f"{version[0][9:-1]}, {place}", "" if int(version[1]) >= 17 else f"Spark needs 17. {_JAVA}")


def library(name: str) -> Finding:
    """Check an installed library's version against Tritium's metadata, without importing it."""
    rule = next(
        rule for rule in map(_RULE.match, importlib.metadata.requires("tritium") or ()) if rule and rule[1] == name
    )
    fix = f'pip install "tritium[{rule[3]}]"' if rule[3] else f'pip install "{name}>={rule[2]}"'
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "not installed", fix)
    old = _numbers(version) < _numbers(rule[2])
    return Finding(name, version, f"needs {rule[2]} or newer: {fix}" if old else "")


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version.partition("+")[0])]


def gpus() -> Finding:
    """Report the GPUs that torch sees. None is fine, as ranks use GPUs only with `gpus=`."""
    try:
        import torch
    except ImportError:
        return Finding("GPUs", "not known without torch")
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return Finding("GPUs", ", ".join(names) or "none")


def scratch() -> Finding:
    """Check the directory in which shards are spooled in local mode."""
    place = (os.environ.get("SPARK_LOCAL_DIRS") or tempfile.gettempdir()).split(",")[0]
    if not os.access(place, os.W_OK):
        return Finding("scratch", f"{place} can't be written", "set SPARK_LOCAL_DIRS to a directory on a local disk")
    return Finding("scratch", f"{place}, {shutil.disk_usage(place).free / 1e9:,.0f} GB free")


def gang() -> Finding:
    """Run an all-gather on two ranks as child processes, without Spark."""
    from tritium.gang.driver.launch import launch

    with tempfile.TemporaryDirectory(prefix="tritium-doctor-") as run_dir:
        before = time.monotonic()
        try:
            gathered = launch(_ranks_of_all, ranks=2, on="driver", run_dir=run_dir, progress=False, output="none")
        except TritiumError as error:
            return Finding("two ranks", f"{type(error).__name__}: {error}", "see the error beside this")
        seconds = time.monotonic() - before
    wrong = "" if gathered == [[0, 1]] * 2 else f"they returned {gathered}"
    return Finding("two ranks", f"formed a gang in {seconds:.1f} s", wrong)


def _ranks_of_all() -> list[Any]:
    from tritium.gang.rank.world import world

    return list(world().gather(world().rank))
