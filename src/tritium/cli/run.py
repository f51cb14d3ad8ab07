"""`tritium run`: a script, a module or a program in the ranks of a gang, from a shell (driver)."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import click

from tritium.errors import BadSetting, TritiumError
from tritium.gang.settings import Gang

_SUFFIXES = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json", ".orc": "orc", ".avro": "avro"}


class _Ranks(click.ParamType):  # type: ignore[type-arg]  # Older versions of click have none.
    name = "N or LEAST:MOST"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        numbers = str(value).split(":")
        if not all(number.isdecimal() for number in numbers) or len(numbers) > 2:
            self.fail(f"{value!r} is neither a number of ranks (4) nor a range (2:4).", param, ctx)
        return int(numbers[0]) if len(numbers) == 1 else (int(numbers[0]), int(numbers[1]))


class Pair(click.ParamType):  # type: ignore[type-arg]
    name = "NAME=VALUE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        name, sign, rest = str(value).partition("=")
        if not name or not sign:
            self.fail(f"{value!r} is no {self.name}.", param, ctx)
        return name, rest


def _options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command an option for every setting of a gang."""
    hints = get_type_hints(Gang)
    for field in reversed(dataclasses.fields(Gang)):
        function = _option(field, hints[field.name])(function)
    return function


def _option(field: dataclasses.Field[Any], hint: Any) -> Callable[..., Any]:
    name = field.name.replace("_", "-")
    about: dict[str, Any] = {"help": field.metadata["doc"], "default": None}
    kinds = [kind for kind in get_args(hint) if kind is not NoneType] or [hint]
    if field.name == "trace":
        text = "The same, with torch's profiler in these steps: --trace-torch 5-9."
        torch = click.option("--trace-torch", metavar="STEPS", help=text)
        return lambda function: click.option("--trace/--no-trace", **about)(torch(function))
    if field.name == "ranks":
        return click.option("--ranks", type=_Ranks(), **about)
    if kinds == [bool]:
        return click.option(f"--{name}/--no-{name}", field.name, **about)
    if get_origin(hint) is Literal:
        return click.option(f"--{name}", field.name, type=click.Choice(get_args(hint)), **about)
    if get_origin(hint) in (Mapping, dict):
        return click.option(f"--{name}", field.name, type=Pair(), multiple=True, **about)
    if field.name == "py_files":
        return click.option(f"--{name}", field.name, multiple=True, **about)
    return click.option(f"--{name}", field.name, type=next((k for k in kinds if k in (int, float)), str), **about)


class _Command(click.Command):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            order = "The program's own options come after it: tritium run --ranks 2 train.py --lr 0.1"
            raise click.UsageError(f"{error.format_message()} {order}", ctx) from error


def _refuse_misplaced(program: str, arguments: Sequence[str], options: Collection[str], module: bool) -> None:
    """Raise UsageError for options of `tritium run` after a script that doesn't name them; else say whose they are."""
    ours = [word for word in (argument.partition("=")[0] for argument in arguments) if word in options]
    readable = not module and program.endswith(".py") and Path(program).is_file()
    if readable:
        text = Path(program).read_text(encoding="utf-8", errors="replace")
        ours = [
            name for name in ours if name.lstrip("-") not in text and name.lstrip("-").replace("-", "_") not in text
        ]
    if not ours:
        return
    names = ", ".join(ours)
    order = f"tritium run {ours[0]} … {program} …"
    if readable:
        raise click.UsageError(
            f"{names} after {program} would be an argument of the program, which does not name it. Options of tritium "
            f"run come before the program: {order}. If the program takes it, say so by --: {program} -- {ours[0]} …"
        )
    click.echo(f"tritium: {names} is passed to {program}. If it is meant for tritium run: {order}", err=True)


@click.command(cls=_Command, context_settings={"allow_interspersed_args": False})  # As torchrun does.
@click.argument("program")
@click.argument("arguments", nargs=-1)
@click.option("-m", "--module", is_flag=True, help="PROGRAM is a module, as for python -m.")
@click.option("--compat", is_flag=True, help="Let imports of horovod mean Tritium's, where it is not installed.")
@click.option(
    "--master", help="Spark's master, such as local[4] or spark://host:7077. Without it ranks run on this machine."
)
@click.option("--conf", type=Pair(), multiple=True, help="A setting of Spark's; with --master.")
@click.option(
    "--data",
    type=Pair(),
    multiple=True,
    help="NAME=PATH of a table in Parquet, CSV, JSON or ORC, or with --master NAME=TABLE of the catalog: the rows of "
    "tritium.world().shard(NAME).",
)
@_options
def run(
    program: str,
    arguments: tuple[str, ...],
    module: bool,
    compat: bool,
    master: str | None,
    conf: tuple[tuple[str, str], ...],
    data: tuple[tuple[str, str], ...],
    trace_torch: str | None,
    **fields: Any,
) -> None:
    """Run PROGRAM, a script as for torchrun or an MPI program, in the ranks of a gang.

    All that follows PROGRAM is passed to it, as by torchrun. The exit code is 0 when every rank has ended with 0, else
    1. A signal is sent to every rank, which has 30 s to end.
    """
    if arguments[:1] == ("--",):
        arguments = arguments[1:]
    else:
        options = {name for parameter in run.params for name in (*parameter.opts, *parameter.secondary_opts)}
        _refuse_misplaced(program, arguments, {name for name in options if name.startswith("--")}, module)
    if compat:
        _import_compat()
    if trace_torch is not None:
        fields["trace"] = f"torch:{trace_torch}"
    settings = {
        name: dict(value) if name == "env" else value for name, value in fields.items() if value not in (None, ())
    }
    start(f"-m {program}" if module else program, arguments, settings, master=master, conf=conf, data=data)


def start(
    program: str,
    arguments: Sequence[str],
    settings: dict[str, Any],
    *,
    master: str | None = None,
    conf: Sequence[tuple[str, str]] = (),
    data: Sequence[tuple[str, str]] = (),
) -> None:
    """Launch a program with these settings of a gang: on this machine, unless a master is named. Exit at Ctrl-C."""
    from tritium.gang.driver.launch import launch

    if master is None:
        settings = {"on": "driver", **settings}
        if conf:
            raise BadSetting("--conf is for Spark: name its master, such as --master local[2].", setting="conf")
    gang = Gang.of(None, settings)
    spark = None if master is None or gang.on != "cluster" else session("tritium run", master, conf)
    try:
        frames = {name: _frame(path, spark) for name, path in data}
        launch(program, gang, args=tuple(arguments), data=frames or None, spark=spark)
    except KeyboardInterrupt as end:
        click.echo(f"tritium: {end or 'interrupted'}; every rank has ended.", err=True)
        sys.exit(1)
    finally:
        if spark is not None:
            spark.stop()


def _import_compat() -> None:
    try:
        importlib.import_module("tritium.compat")
    except ModuleNotFoundError as error:
        raise TritiumError(f"--compat: {error}") from error


def session(name: str, master: str | None, conf: Sequence[tuple[str, str]], remote: str | None = None) -> Any:
    """Return a SparkSession for a command: of a master, of a Connect server, or as Spark's own files say."""
    try:
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise TritiumError(f'A cluster needs pyspark: pip install "tritium[spark]" ({error}).') from error
    builder = SparkSession.builder.appName(name)
    if remote is not None:
        builder = builder.remote(remote)
    if master is not None:
        builder = builder.master(master)
    for key, value in conf:
        builder = builder.config(key, value)
    return builder.getOrCreate()


def _frame(path: str, spark: Any) -> Any:
    """Return the rows of a file or directory: a DataFrame of Spark's, or without a session an Arrow table."""
    kind = _SUFFIXES.get(Path(path).suffix, "" if spark is not None and not Path(path).exists() else "parquet")
    if spark is not None:
        if not kind:
            return spark.table(path)
        options = {"header": "true", "inferSchema": "true"} if kind == "csv" else {}
        return spark.read.format(kind).options(**options).load(path)
    from pyarrow import dataset

    if not Path(path).exists():
        raise BadSetting(f"--data: there is no {path}.", setting="data")
    try:
        return dataset.dataset(path, format=kind).to_table()
    except (ValueError, OSError) as error:
        raise BadSetting(f"--data: {path} can't be read as {kind}: {error}", setting="data") from error
