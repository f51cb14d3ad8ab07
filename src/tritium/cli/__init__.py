"""The `tritium` command: doctor, new, run, demo, report, ui, clean, serve (driver)."""

from __future__ import annotations

import importlib.metadata
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import click
import fsspec  # type: ignore[import-untyped]

from tritium import events
from tritium.cli import findings
from tritium.cli.clean import clean
from tritium.cli.doctor import doctor
from tritium.cli.new import new
from tritium.cli.run import run
from tritium.cli.serve import serve
from tritium.cli.ui import ui
from tritium.errors import TritiumError
from tritium.observe.page import RunPage

# The group of entry points by which other packages add commands.
_COMMANDS = "tritium.commands"
_DEMO = ("pyspark", "pandas", "torch", "matplotlib")


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
main.add_command(doctor)
main.add_command(new)
main.add_command(run)
main.add_command(serve)
main.add_command(ui)


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
    wrong = [f for f in (findings.java(), *map(findings.library, _DEMO)) if f.fix]
    if wrong:
        findings.show(wrong)
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
