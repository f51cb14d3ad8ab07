"""The `tritium` command: doctor, new, run, demo, report, ui, clean, serve (driver)."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import fsspec  # type: ignore[import-untyped]

from tritium import events
from tritium.cli.clean import clean
from tritium.cli.new import new
from tritium.cli.run import run
from tritium.cli.serve import serve
from tritium.cli.ui import ui
from tritium.errors import TritiumError
from tritium.observe.page import RunPage
from tritium.spark import python as worker_python

_JAVA = (
    "Debian: sudo apt-get install openjdk-17-jre-headless; macOS: brew install --cask temurin@17; "
    "conda: conda install -c conda-forge openjdk=17"
)
# The group of entry points by which other packages add commands.
_COMMANDS = "tritium.commands"
# Matches metadata such as `pandas<3,>=2.2; extra == "spark"`.
_RULE = re.compile(r"([\w-]+)[^>]*>=([\d.]+)(?:.*extra == .(\w+))?")


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    subject: str
    result: str
    fix: str = ""
    """The remedy; "" if nothing is wrong."""


class _Commands(click.Group):
    """A command group with the commands of other packages, which shows Tritium's errors without a traceback.

    The other packages name their commands as entry points of the group `tritium.commands`.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *importlib.metadata.entry_points(group=_COMMANDS).names})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if (builtin := super().get_command(ctx, cmd_name)) is not None:
            return builtin
        for entry in importlib.metadata.entry_points(group=_COMMANDS, name=cmd_name):
            command: click.Command = entry.load()
            return command
        if cmd_name == "horovodrun":
            raise click.UsageError('The command horovodrun is in tritium-compat: pip install "tritium[compat]".')
        return None

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except TritiumError as error:
            raise click.ClickException(f"{type(error).__name__}: {error}") from error


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="tritium", prog_name="tritium")
def main() -> None:
    """Big data and deep learning as one job on Apache Spark."""


main.add_command(clean)
main.add_command(new)
main.add_command(run)
main.add_command(serve)
main.add_command(ui)


@main.command()
def doctor() -> None:
    """Check what Tritium needs on this machine, and start a gang of two ranks here."""
    findings = [python(), java(), *map(library, ("pyspark", "pandas", "pyarrow", "numpy", "torch")), gpus(), scratch()]
    findings.insert(1, workers())
    wrong = [finding for finding in findings if finding.fix]
    if not wrong:
        findings.append(gang())
        wrong = [finding for finding in findings if finding.fix]
    _show(findings)
    if wrong:
        raise click.ClickException(
            f"{len(wrong)} of {len(findings)} will not do; how to fix each is written beside it."
        )
    click.echo("Everything is in place.")


@main.command()
@click.option("--data", type=click.Path(exists=True, dir_okay=False, resolve_path=True), help="Another hour.csv.")
def demo(data: str | None) -> None:
    """Train on the bike-sharing data with two ranks, then score a batch and a stream."""
    example = Path(__file__).resolve().parents[3] / "examples" / "bike_sharing.py"
    if not example.is_file():
        raise click.ClickException(
            "The demo is a file of Tritium's repository, examples/bike_sharing.py, and not part of the installed "
            f"package: there is no {example}. Clone the repository and type `make demo` there."
        )
    wrong = [f for f in (java(), *map(library, ("pyspark", "pandas", "torch", "matplotlib"))) if f.fix]
    if wrong:
        _show(wrong)
        raise click.ClickException("The demo can't start without these.")
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # Else Spark starts the python3 of the PATH.
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1")  # Halves the start of a short JVM.
    sys.argv = [str(example), *([data] if data else [])]
    runpy.run_path(str(example), run_name="__main__")


@main.command()
@click.argument("run_dir")
@click.option("--html", is_flag=True, help="Print the page instead, as the end of a run writes it to report.html.")
def report(run_dir: str, html: bool) -> None:
    """Print the report of the run in RUN_DIR: a path, or any URL that fsspec supports."""
    place = f"{run_dir.rstrip('/')}/report.json"
    try:
        with fsspec.open(place, encoding="utf-8", mode="r") as file:
            content = json.load(file)
    except FileNotFoundError:
        raise click.ClickException(f"There is no {place}: it is written when a run has ended.") from None
    if html:
        click.echo(_page(run_dir, content), nl=False)
        return
    how = "ended well" if content["ok"] else "failed"
    click.echo(f"run {content['run']} {how} after {content['seconds']} s, started {content['started']}")
    until = ", ".join(f"{what} after {seconds} s" for what, seconds in content["seconds_until"].items())
    click.echo(f"  {until}" if until else "  no rank was ever there")
    for rank in content["ranks"]:
        click.echo(f"rank {rank['rank']} on {rank.get('host', '?')}, {rank.get('device', '?')}, pid {rank.get('pid')}")
        for name, counts in rank.get("shards", {}).items():
            click.echo(f"  {name}: " + ", ".join(f"{what} {count:,}" for what, count in counts.items()))
        if traced := rank.get("trace"):
            click.echo(f"  {_sections(traced)}")
        if logged := rank.get("logged"):
            click.echo("  last logged: " + ", ".join(f"{name} {_short(value)}" for name, value in logged.items()))
    for title, lines in (("note", content["notes"]), ("stored", content["stored"])):
        for line in lines:
            click.echo(f"{title}: {line}")
    if saved := content.get("checkpoint"):
        click.echo(f"checkpoint: step {saved['step']}, {saved['bytes']:,} bytes, {saved['path']}")
    if failure := content["failure"]:
        who = "it" if failure["rank"] is None else f"rank {failure['rank']}"
        click.echo(f"{who} failed ({failure['how']}): {failure['type']} {failure['text']}".rstrip())
        click.echo(failure["traceback"].rstrip())


def _page(run_dir: str, report: dict[str, Any]) -> str:
    page = RunPage()
    with fsspec.open(f"{run_dir.rstrip('/')}/events.jsonl", "rb") as lines:
        for event in map(events.read, lines):
            if event.run == report["run"]:
                page.add(event)
    return page.document(report)


def _sections(trace: dict[str, Any]) -> str:
    """Format a trace: `1,200 steps of 8.1 ms: wait for data 2 %, …`."""
    seconds, steps = trace["seconds"], trace["steps"]
    whole = sum(seconds.values()) or 1.0
    shares = ", ".join(f"{name} {value / whole:.0%}" for name, value in seconds.items())
    return f"{steps:,} steps of {whole / max(1, steps) * 1000:.1f} ms: {shares}"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


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


def _show(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    for finding in findings:
        table.add_row("[red]✗" if finding.fix else "[green]✓", finding.subject, finding.result, finding.fix)
    Console().print(table)
