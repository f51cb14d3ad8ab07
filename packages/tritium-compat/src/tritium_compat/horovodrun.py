"""`tritium horovodrun`: the command line of `horovodrun`, which starts ranks of this machine or of a Spark cluster."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shlex
import shutil
import socket
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click

from tritium.errors import BadSetting, TritiumError
from tritium.integration import installed
from tritium.integration.command import Pair, start

_COMMAND = 'import sys\nfrom tritium.cli import main\n\nmain(["horovodrun", *sys.argv[1:]], prog_name="tritium")\n'
_HERE = {"localhost", "127.0.0.1", "::1"}
_HOSTS = "ranks on other hosts are tasks of Spark: name its master, such as --master spark://host:7077."
_REASON_OF_REFUSED_OPTION = {
    "--mpi": "ranks find each other without MPI.",
    "--jsrun": "ranks are started without LSF.",
    "--mpi-args": "ranks find each other without MPI.",
    "--tcp": "ranks find each other without MPI.",
    "--binding-args": "ranks find each other without MPI.",
    "--host-discovery-script": _HOSTS,
    "--slots-per-host": _HOSTS,
    "-p/--ssh-port": _HOSTS,
    "-i/--ssh-identity-file": _HOSTS,
    "--config-file": "give its settings as options.",
    "--output-filename": "the output of each rank is kept in the run directory, which TRITIUM_RUNS places.",
    "--timeline-filename": "there is no timeline of Horovod. `tritium run --compat --trace` measures where time goes.",
}
_VALUES_OF_NEEDLESS_OPTION = {
    **dict.fromkeys(("--gloo", "--disable-cache", "--autotune", "--no-autotune", "--mpi-threads-disable"), 0),
    **dict.fromkeys(("--hierarchical-allreduce", "--hierarchical-allgather", "--torus-allreduce"), 0),
    **dict.fromkeys(("--timeline-mark-cycles", "--log-with-timestamp", "--log-without-timestamp"), 0),
    **dict.fromkeys(("--prefix-output-with-timestamp", "--log-hide-timestamp"), 0),
    **dict.fromkeys(("--fusion-threshold-mb", "--cycle-time-ms", "--cache-capacity", "--num-nccl-streams"), 1),
    **dict.fromkeys(("--thread-affinity", "--gloo-timeout-seconds", "--log-level", "--elastic-timeout"), 1),
    **dict.fromkeys(("--autotune-log-file", "--stall-check-warning-time-seconds"), 1),
    "--blacklist-cooldown-range": 2,
}
# They ask for what Tritium does in any case, so that no note is due.
_SILENT = ("--gloo", "--prefix-output-with-timestamp")
_FLAGS = ("--mpi", "--jsrun", "--tcp")


def _name(option: str) -> str:
    return option.rpartition("/")[2].lstrip("-").replace("-", "_")


def _others(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a command take the options that are refused, or that do nothing here."""
    for option in reversed(_REASON_OF_REFUSED_OPTION):
        kind: dict[str, Any] = {"is_flag": True} if option in _FLAGS else {"default": None}
        function = click.option(*option.split("/"), _name(option), hidden=True, **kind)(function)
    for option, values in _VALUES_OF_NEEDLESS_OPTION.items():
        kind = {"is_flag": True} if not values else {"default": None, "nargs": values}
        function = click.option(option, _name(option), hidden=True, **kind)(function)
    return function


def _check_build(ctx: click.Context, _: click.Parameter, asked: bool) -> None:
    """Print the available frameworks and transports, as `horovodrun --check-build` does, and end."""
    if not asked or ctx.resilient_parsing:
        return

    def box(has: bool) -> str:
        return "[X]" if has else "[ ]"

    has_torch = importlib.util.find_spec("torch") is not None
    nccl = has_torch and importlib.import_module("torch.distributed").is_nccl_available()
    tables = {
        "Available Frameworks": {
            "TensorFlow": importlib.util.find_spec("tensorflow") is not None,
            "PyTorch": has_torch,
            "MXNet": False,
        },
        "Available Controllers": {"MPI": False, "Gloo": has_torch},
        "Available Tensor Operations": {"NCCL": nccl, "DDL": False, "CCL": False, "MPI": False, "Gloo": has_torch},
    }
    click.echo(f"Tritium {version('tritium')}, with Horovod's API:")
    for title, rows in tables.items():
        click.echo(f"\n{title}:")
        for name, has in rows.items():
            click.echo(f"    {box(has)} {name}")
    ctx.exit()


def _install(ctx: click.Context, _: click.Parameter, asked: bool) -> None:
    """Write a command `horovodrun` beside this Python, unless there is one, and end."""
    if not asked or ctx.resilient_parsing:
        return
    real = installed("horovod")
    if real is not None:
        raise BadSetting(f"Horovod is installed ({real}), and horovodrun is its command.")
    place = Path(sys.executable).parent / "horovodrun"
    existing = place if place.exists() else shutil.which("horovodrun")
    if existing is not None:
        raise BadSetting(f"There is a command horovodrun: {existing}. Nothing was written.")
    try:
        place.write_text(f"#!{sys.executable}\n{_COMMAND}")
        place.chmod(0o755)
    except OSError as error:
        raise TritiumError(f"{place} can't be written: {error}. Use `tritium horovodrun`.") from error
    click.echo(f"{place} runs `tritium horovodrun`. Remove that file before you install Horovod.")
    ctx.exit()


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("-np", "--num-proc", "np", type=click.IntRange(1), help="How many ranks there are.")
@click.option("-H", "--hosts", help="localhost:2. Other hosts are refused: name a --master.")
@click.option("-hostfile", "--hostfile", help="A file of hosts, of which the same holds.")
@click.option("--min-np", "--min-num-proc", "least", type=click.IntRange(1), help="The least number of ranks.")
@click.option("--max-np", "--max-num-proc", "most", type=click.IntRange(1), help="The largest number of ranks.")
@click.option("--reset-limit", type=click.IntRange(0), help="How often the ranks are started again after a loss.")
@click.option("--start-timeout", type=float, help="Seconds within which every rank must have started.")
@click.option(
    "--network-interfaces", "--network-interface", help="The interfaces by which ranks reach each other: eth0,eth1."
)
@click.option("--no-stall-check", is_flag=True, help="Only report ranks that make no progress.")
@click.option("--stall-check-shutdown-time-seconds", type=float, help="Seconds without progress that end the ranks.")
@click.option("--verbose", is_flag=True, help="Show progress.")
@click.option("--master", help="Spark's master: the ranks are its tasks. Without it they run on this machine.")
@click.option("--conf", type=Pair(), multiple=True, help="A setting of Spark's; with --master.")
@click.option("--check-build", "-cb", is_flag=True, is_eager=True, expose_value=False, callback=_check_build)
@click.option(
    "--install",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_install,
    help="Write a command horovodrun beside this Python, where there is none.",
)
@click.version_option(package_name="tritium", prog_name="tritium horovodrun")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@_others
def horovodrun(
    np: int | None,
    hosts: str | None,
    hostfile: str | None,
    least: int | None,
    most: int | None,
    reset_limit: int | None,
    start_timeout: float | None,
    network_interfaces: str | None,
    no_stall_check: bool,
    stall_check_shutdown_time_seconds: float | None,
    verbose: bool,
    master: str | None,
    conf: tuple[tuple[str, str], ...],
    command: tuple[str, ...],
    **others: Any,
) -> None:
    """Run COMMAND (python train.py …, python -m module …) in ranks that Horovod connects.

    Exit codes and signals are those of `tritium run`.
    """
    for option, why in _REASON_OF_REFUSED_OPTION.items():
        if others[_name(option)]:
            raise BadSetting(f"horovodrun {option}: {why}", setting=option)
    needless = [option for option in _VALUES_OF_NEEDLESS_OPTION if others[_name(option)] and option not in _SILENT]
    if needless:
        click.echo(f"tritium horovodrun: nothing here needs {', '.join(needless)}.", err=True)
    if not command:
        raise click.UsageError("What is to be run? horovodrun -np 2 python train.py")
    ranks = _ranks(np, least, most, _slots(hosts, hostfile, on_cluster=master is not None))
    settings: dict[str, Any] = {"ranks": ranks, "framework": "horovod", "progress": verbose}
    env = {}
    if isinstance(ranks, tuple):
        settings["retries"] = 3
    if reset_limit is not None:
        settings["retries"], env["TRITIUM_RESET_LIMIT"] = reset_limit, str(reset_limit)
    if network_interfaces:
        env["GLOO_SOCKET_IFNAME"] = network_interfaces
    if start_timeout is not None:
        settings["start_timeout"] = start_timeout
    if stall_check_shutdown_time_seconds:
        settings["stall_timeout"] = stall_check_shutdown_time_seconds
    if no_stall_check:
        settings["on_stall"] = "report"
    importlib.import_module("tritium.compat")
    program, arguments = _program(command)
    start(program, arguments, settings | {"env": env}, master=master, conf=conf)


def _slots(hosts: str | None, hostfile: str | None, *, on_cluster: bool) -> int | None:
    """Return the number of slots named for this machine; None: none are. Raises BadSetting for other hosts."""
    entries = [] if hosts is None else [part.strip() for part in hosts.split(",")]
    if hostfile is not None:
        if not Path(hostfile).is_file():
            raise BadSetting(f"horovodrun --hostfile: there is no file {hostfile}.", setting="hostfile")
        lines = [line.partition("#")[0].split() for line in Path(hostfile).read_text().splitlines()]
        entries += [f"{line[0]}:{line[1].partition('=')[2] if len(line) > 1 else 1}" for line in lines if line]
    if not entries:
        return None
    if on_cluster:
        raise BadSetting("horovodrun --hosts with --master: Spark knows its hosts. Leave --hosts out.", setting="hosts")
    total = 0
    for one in entries:
        name, _, slots = one.partition(":")
        if name not in _HERE | {socket.gethostname(), socket.getfqdn()}:
            raise BadSetting(f"horovodrun: {name} is another host, and {_HOSTS}", setting="hosts")
        if slots and not slots.isdecimal():
            raise BadSetting(f"horovodrun: {one!r} is no host with its slots, such as localhost:2.", setting="hosts")
        total += int(slots or 1)
    return total


def _ranks(np: int | None, least: int | None, most: int | None, slots: int | None) -> int | tuple[int, int]:
    count = np or most or least or slots
    if count is None:
        raise click.UsageError("How many ranks? -np 2")
    if slots is not None and (least or count) > slots:
        raise BadSetting(f"horovodrun: {least or count} ranks were asked for, and {slots} slots given.", setting="np")
    if least is None and most is None:
        return count
    return least or count, most or count


def _program(command: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Return the program and arguments of a command, for `launch`. Raises BadSetting for options of Python's."""
    first, rest = command[0], list(command[1:])
    if not Path(first).name.startswith("python"):
        return first, rest
    other = os.sep in first and os.path.abspath(first) not in _pythons()
    if other:
        raise BadSetting(f"horovodrun: ranks run this Python, {sys.executable}, not {first}. Install Tritium there.")
    while rest and rest[0] == "-u":  # Output is shown as it comes in any case.
        rest.pop(0)
    if not rest or rest[0] in ("-c", "-"):
        raise BadSetting(f"horovodrun: {shlex.join(command)} names no script or module. Write the program to a file.")
    if rest[0] == "-m" and len(rest) > 1:
        return f"-m {rest[1]}", rest[2:]
    if rest[0].startswith("-"):
        raise BadSetting(
            f"horovodrun: the option {rest[0]} of Python is not passed on. Give it by its variable (PYTHONWARNINGS for "
            "-W, PYTHONOPTIMIZE for -O)."
        )
    return rest[0], rest[1:]


def _pythons() -> set[str]:
    """Return the paths of this Python."""
    folder = Path(sys.executable).parent
    return {sys.executable, *(str(folder / name) for name in ("python", "python3", f"python3.{sys.version_info[1]}"))}
