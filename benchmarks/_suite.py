"""What the benchmarks share: systems in processes and environments of their own, a quiet machine, results as JSON."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from typing import Self

ROOT = Path(__file__).resolve().parents[1]
SYSTEMS = ROOT / "benchmarks" / "systems"
RESULTS = ROOT / "benchmarks" / "results"
QUIET = 0.15  # of all cores: what the machine may be doing besides
PATIENCE = 60.0  # seconds to wait for that, before it is measured all the same and said


@functools.cache
def python_of(environment: str) -> str:
    """The Python of a peer's environment, which is made the first time; "tritium" is the one that runs this."""
    if environment == "tritium":
        return sys.executable
    made = subprocess.run([ROOT / "scripts" / "peers.sh", environment], stdout=subprocess.PIPE, text=True, check=True)
    return made.stdout.split()[-1]


def quiet() -> float:
    """Waits until the machine has little else to do; the share of all cores that was still busy."""
    until = time.monotonic() + PATIENCE
    while (busy := psutil.cpu_percent(1.0) / 100) > QUIET and time.monotonic() < until:
        pass
    return busy


def run(environment: str, script: str, *arguments: object, limit: float = 1800, memory: bool = False) -> dict[str, Any]:
    """One run of a script of systems/ in its environment: its last line that is JSON, and how busy the machine was.

    With `memory`, also the peaks of its `Tree`. RuntimeError with the end of what it printed when it fails or takes
    longer than `limit` seconds.
    """
    command = [python_of(environment), str(SYSTEMS / f"{script}.py"), *map(str, arguments)]
    busy = quiet()
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with (
        tempfile.TemporaryDirectory(prefix="tritium-bench-runs-") as runs,
        subprocess.Popen(command, env={**os.environ, "TRITIUM_RUNS": runs}, start_new_session=True, **pipes) as process,
    ):
        tree = Tree(process.pid)
        try:
            with tree if memory else contextlib.nullcontext():
                said, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            said = f"not done after {limit:g} s"
        finally:
            _end(process.pid)
    results = [line for line in said.splitlines() if line.startswith("{")]  # ray's servers say more after it
    if results and not process.returncode:
        with contextlib.suppress(json.JSONDecodeError):
            return {**json.loads(results[-1]), "busy before": busy, **(tree.peak if memory else {})}
    tail = "\n    ".join(said.splitlines()[-25:])
    raise RuntimeError(f"{script} ({environment}) gave no result, exit code {process.returncode}:\n    {tail}")


class Sampler:
    """While it is entered, a thread calls `look()` every `seconds`."""

    def __init__(self, seconds: float = 0.1) -> None:
        self._seconds = seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(self._seconds):
            self.look()

    def look(self) -> None:
        """For subclasses."""
        raise NotImplementedError


class Tree(Sampler):
    """Keeps the peak of the sum of PSS over a process and all below it, in MB."""

    def __init__(self, pid: int) -> None:
        super().__init__()
        self.peak = {"tree MB": 0.0, "without the JVM MB": 0.0}
        self._root = psutil.Process(pid)

    def look(self) -> None:
        """One sum."""
        tree = jvm = 0.0
        with contextlib.suppress(psutil.Error):
            for process in [self._root, *self._root.children(recursive=True)]:
                with contextlib.suppress(OSError, psutil.Error):  # one that has just ended
                    pss = _pss(process.pid)
                    tree += pss
                    jvm += pss if process.name() == "java" else 0.0
        now = {"tree MB": tree, "without the JVM MB": tree - jvm}
        self.peak = {name: max(self.peak[name], value) for name, value in now.items()}


def _pss(pid: int) -> float:
    match = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    return int(match[1]) / 1e3 if match else 0.0


def _end(leader: int) -> None:
    """Ends what a system left running in the session that it was started in: ray leaves servers, for one."""
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == leader:
                process.kill()
        except (psutil.Error, ProcessLookupError):
            continue


def arguments(doc: str, systems: Iterable[str], rounds: int) -> argparse.ArgumentParser:
    """A parser with what every benchmark of systems takes: --rounds, --only, --save."""
    names = list(systems)
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--save", action="store_true")
    return parser


def prepare(environments: Iterable[str]) -> None:
    """Makes them before anything is timed."""
    for environment in environments:
        python_of(environment)


def failed(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> int:
    """The exit code: 1 when a system has failed."""
    return int(any("error" in one for runs in found.values() for one in runs))


def in_turn(
    sides: Mapping[str, Callable[[], dict[str, Any]]], rounds: Mapping[str, int]
) -> dict[str, list[dict[str, Any]]]:
    """Round after round, each side that still has one: whatever disturbs the machine disturbs all alike.

    A side that fails is left out of the following rounds; its place keeps the first line of why ({"error": …}), since
    what follows names this machine's paths, and all of it is printed.
    """
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for number in range(max(rounds.values())):
        for name, side in sides.items():
            if number >= rounds[name] or any("error" in one for one in found[name]):
                continue
            began = time.monotonic()
            try:
                one = side()
            except RuntimeError as problem:
                one = {"error": str(problem).partition("\n")[0]}
                print(problem, file=sys.stderr)
            found[name].append(one)
            said = "failed" if "error" in one else f"{one['seconds']:.2f} s" if "seconds" in one else "done"
            print(f"round {number + 1}  {name:<28} {said}   ({time.monotonic() - began:.0f} s in all)", flush=True)
    return found


def times(rounds: int, sides: Mapping[str, Callable[[], float]]) -> dict[str, list[float]]:
    """What each side returns, round after round, in this process: the sides take turns."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            found[name].append(side())
    return found


def median(runs: Iterable[Mapping[str, Any]], key: str) -> float | None:
    """Of a number that each run has; None where none has it."""
    values = [one[key] for one in runs if one.get(key) is not None]
    return statistics.median(values) if values else None


def ratio(one: float | None, other: float | None) -> float | None:
    """None when either is missing."""
    return one / other if one and other else None


def spread(runs: Sequence[Mapping[str, Any]], key: str) -> tuple[float, float, float] | None:
    """Median, least and most."""
    values = [one[key] for one in runs if one.get(key) is not None]
    return (statistics.median(values), min(values), max(values)) if values else None


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    java = subprocess.run(["java", "-version"], stderr=subprocess.PIPE, text=True, check=True).stderr
    model = re.search(r"^model name\s*: (.*)$", _text("/proc/cpuinfo"), re.MULTILINE)
    return {
        "processor": model.group(1) if model else platform.processor(),
        "cores": os.cpu_count(),
        "memory GB": round(psutil.virtual_memory().total / 1e9, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "java": java.splitlines()[0],
        "commit": _git("rev-parse", "--short", "HEAD"),
        "date": time.strftime("%Y-%m-%d"),
    }


def seconds_of(run: Callable[[int], None], ranks: int) -> float:
    """How long `run(ranks)` takes."""
    began = time.perf_counter()
    run(ranks)
    return time.perf_counter() - began


def save(name: str, result: Mapping[str, Any]) -> Path:
    """Writes benchmarks/results/NAME.json, with the machine and the command; docs/benchmarks.md is made of these."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    command = shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    path.write_text(json.dumps({"command": command, "machine": machine(), **result}, indent=1) + "\n", encoding="utf-8")
    print(f"written: {path.relative_to(ROOT)}")
    return path


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""


def _git(*words: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *words], stdout=subprocess.PIPE, text=True, check=False)
    return done.stdout.strip()
