"""The place where the trainings run: a cluster, the driver process on it, and all processes by their role."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from pyspark.find_spark_home import _find_spark_home

import clusters
import leaks
from clusters import Workers

PROGRAM = Path(__file__).with_name("training.py")
NAME = "TRITIUM_CHAOS"  # in the environment of every process that is started here
DISK_BYTES = 96 << 20  # of the scratch disk, and of that of the run directories
START_SECONDS = 120.0
GONE_SECONDS = 20.0  # within which a killed driver's processes are gone: twice the promise, as this machine is busy
IDLE = ("ThreadPoolExecutor.getTask", "LinkedBlockingQueue.take", "nio.ch.SelectorImpl", "No compile task")  # threads
CLUSTER = ("org.apache.spark.deploy.master.", "org.apache.spark.deploy.worker.")
KINDS = ("local-cluster", "standalone")
ROLES = ("rank", "fork server", "supervisor", "daemon", "executor")


class Driver:
    """A process that trains on request: see training.py."""

    def __init__(self, kind: str, master: str, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "cwd").mkdir()
        (folder / "tmp").mkdir()
        self.log = folder / "log"
        self._answers, answers = os.pipe()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(PROGRAM), kind, master, str(answers)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=folder / "cwd",
                env={**os.environ, "TMPDIR": str(folder / "tmp")},
                pass_fds=(answers,),
            )
        leaks.STRANGERS.add(self.process.pid)  # what it leaves behind is looked for by itself
        os.close(answers)
        self._buffer = b""
        self.application = self.wait(START_SECONDS)["application"]

    def ask(self, do: str, **fields: Any) -> None:
        """Send a request. Where the driver has ended it is lost, and `answer` raises."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps({"do": do, **fields}).encode() + b"\n")
            self.process.stdin.flush()

    def answer(self, seconds: float = 0.0) -> dict[str, Any] | None:
        """Return the next answer, or None after so many seconds. Raises EOFError where the driver has ended."""
        while b"\n" not in self._buffer:
            if not select.select([self._answers], [], [], seconds)[0]:
                return None
            data = os.read(self._answers, 1 << 20)
            if not data:
                raise EOFError(f"the driver has ended with exit code {self.process.wait()}")
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        return dict(json.loads(line))

    def wait(self, seconds: float) -> dict[str, Any]:
        """Return the next answer. Raises TimeoutError where none comes."""
        found = self.answer(seconds)
        if found is None:
            raise TimeoutError(f"the driver has not answered within {seconds:.0f} s")
        return found

    def tail(self, lines: int = 60) -> str:
        """Return the last lines that it and its JVM wrote."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def close(self) -> None:
        """Wait for its end, or kill it."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self._answers)


class Ground:
    """One cluster for many rounds; a driver is started whenever there is none."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.folder = folder
        self.master = ""
        self.scratch, self.runs = folder / "scratch", folder / "runs"
        self._driver: Driver | None = None
        self._drivers = 0
        self.references: dict[str, Any] = {}
        """What each training gives that nothing disturbs."""

    def driver(self) -> Driver:
        """Return the running driver, or a new one."""
        if self._driver is None:
            self._drivers += 1
            self._driver = self._started()
        return self._driver

    def _started(self) -> Driver:
        with self.environment():
            return Driver(self.kind, self.master, self.folder / f"driver-{self._drivers}")

    def start_worker(self) -> None:
        """Start one more worker of a standalone cluster."""
        with self.environment():
            Workers.here.start()

    @contextlib.contextmanager
    def environment(self) -> Iterator[None]:
        """Set the environment: processes started in this block are marked, and write to the disk that can be filled."""
        changes = {NAME: self.name, "SPARK_LOCAL_DIRS": str(self.scratch), "PYTHONFAULTHANDLER": "1"}
        before = {name: os.environ.get(name) for name in changes}
        os.environ.update(changes)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

    def kill_driver(self) -> None:
        """SIGKILL the driver; `driver_is_dead` must be called next."""
        assert self._driver is not None
        self._driver.process.kill()

    def driver_is_dead(self) -> list[str]:
        """Clean up after a driver that was killed. Return what it had left behind."""
        assert self._driver is not None
        driver, self._driver = self._driver, None
        driver.process.kill()
        driver.close()
        deadline = time.monotonic() + GONE_SECONDS
        while (left := self._left_by_driver()) and time.monotonic() < deadline:
            time.sleep(0.05)
        shutil.rmtree(Path(_find_spark_home(), "work", driver.application), ignore_errors=True)
        for process in self.everything():  # whatever they do: the next round shall not find them
            if self.kind == "local-cluster":
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        if self.kind == "local-cluster":  # its JVM had no time to remove them
            for path in self.scratch.iterdir():
                shutil.rmtree(path, ignore_errors=True)
        return left

    def _left_by_driver(self) -> list[str]:
        """Return every process in which its application ran; those of a standalone cluster itself stay."""
        return [
            f"of the killed driver: {' '.join(command)[:200]}"
            for _, command in self._commands()
            if not any(word.startswith(CLUSTER) for word in command)
        ]

    def renew(self) -> None:
        """Clean up after a round that has failed."""
        if self._driver is not None:
            self.driver_is_dead()
        for path in self.scratch.glob("*ballast*"):
            path.unlink()

    def logs(self) -> list[str]:
        """Return the last lines of the driver, its JVM and its executors."""
        own = ["--- the driver and its JVM", self._driver.tail()] if self._driver is not None else []
        return own + self.executors_logs()

    def close(self) -> None:
        """End the driver."""
        if self._driver is not None:
            application = self._driver.application
            self._driver.close()
            self._driver = None
            shutil.rmtree(Path(_find_spark_home(), "work", application), ignore_errors=True)

    # ---- processes

    def everything(self) -> list[psutil.Process]:
        """Return all processes that were started here, orphans too."""
        me, found = os.getpid(), []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.pid != me and process.environ().get(NAME) == self.name:
                    found.append(process)
        return found

    @property
    def name(self) -> str:
        """The mark of the processes of this ground."""
        return f"{os.getpid()} {self.kind}"

    def _commands(self) -> Iterator[tuple[psutil.Process, list[str]]]:
        for process in self.everything():
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE and (command := process.cmdline()):
                    yield process, command

    def roles(self) -> dict[str, list[psutil.Process]]:
        """Return the processes that a gang runs in, by role, the oldest first."""
        found: dict[str, list[psutil.Process]] = {role: [] for role in ROLES}
        commands = dict(self._commands())
        by_pid = {process.pid: command for process, command in commands.items()}
        for process, command in commands.items():
            text = " ".join(command)
            if "tritium.gang.rank." in text:
                with contextlib.suppress(psutil.Error):
                    forked = "tritium.gang.rank.fork_server" in " ".join(by_pid.get(process.ppid(), ()))
                    found["rank" if forked or "fork_server" not in text else "fork server"].append(process)
            elif "pyspark.daemon" in text:
                with contextlib.suppress(psutil.Error):
                    parent = " ".join(by_pid.get(process.ppid(), ()))
                    found["supervisor" if "pyspark.daemon" in parent else "daemon"].append(process)
            elif "CoarseGrainedExecutorBackend" in text:
                found["executor"].append(process)
        for processes in found.values():
            processes.sort(key=lambda process: (process.create_time(), process.pid))
        return found

    def left(self) -> list[str]:
        """Wait up to 8 s until nothing of a training is left. Return what is left then."""
        deadline = time.monotonic() + 8.0
        while (found := self._left()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    def _left(self) -> list[str]:
        roles = self.roles()
        found = [f"{role} {process.pid}" for role in ("rank", "fork server") for process in roles[role]]
        for process in (*roles["supervisor"], *roles["daemon"]):
            for held in _held(process.pid):
                if held.startswith(str(self.scratch)):
                    found.append(f"{held}, held by a Python worker of Spark's (pid {process.pid})")
        found += [f"file {path}" for path in self.scratch.rglob("*tritium*")]
        return found

    # ---- when nothing moves

    def dump(self) -> str:
        """Return the states of all processes, and stacks of Python and Java. Ends the Python processes."""
        said = ["--- processes"]
        roles = self.roles()
        names = {process.pid: role for role, processes in roles.items() for process in processes}
        for process, command in self._commands():
            with contextlib.suppress(psutil.Error, OSError):
                channel = Path(f"/proc/{process.pid}/wchan").read_text()
                role = names.get(process.pid, "")
                said.append(f"{process.pid} of {process.ppid()} {process.status()} {channel} {role} {command[-1]:.80}")
        for process, command in self._commands():
            with contextlib.suppress(psutil.Error):
                if "java" in command[0]:
                    process.send_signal(signal.SIGQUIT)  # to its standard output
                elif str(PROGRAM) in command:
                    process.send_signal(signal.SIGUSR1)
        time.sleep(1.0)
        for role in ("rank", "fork server", "supervisor"):  # PYTHONFAULTHANDLER: the stacks go to its standard error
            for process in roles[role]:
                with contextlib.suppress(psutil.Error):
                    process.send_signal(signal.SIGCONT)
                    process.send_signal(signal.SIGABRT)
            time.sleep(1.0)
        if self._driver is not None:
            blocks = self._driver.log.read_text(errors="replace").split("\n\n")
            busy = [block for block in blocks if not any(word in block for word in IDLE)]
            said += ["--- the driver and its JVM", *busy]
        said += self.executors_logs(200)
        return "\n".join(said)

    def executors_logs(self, lines: int = 40) -> list[str]:
        """Return the last lines that executors, and the Python workers in them, wrote."""
        said = []
        application = self._driver.application if self._driver else "none"
        folders = [Path(_find_spark_home(), "work", application)]
        if self.kind == "standalone":
            folders = [folder / application for folder in Workers.here.folder.iterdir() if folder.is_dir()]
        for folder in folders:
            for path in sorted(folder.rglob("std*")):
                if text := path.read_text(errors="replace").splitlines()[-lines:]:
                    said += [f"--- {path.relative_to(folder)}", *text]
        return said


def _held(pid: int) -> Iterator[str]:
    """Yield the deleted files that a process holds open."""
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                target = os.readlink(entry)
                if target.endswith("(deleted)"):
                    yield target


@contextlib.contextmanager
def disk(folder: Path) -> Iterator[None]:
    """Mount a small disk at this folder, where this process may mount one."""
    folder.mkdir(parents=True)
    options = ["-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tritium-chaos", str(folder)]
    mounted = os.geteuid() == 0 and subprocess.run(["mount", *options], capture_output=True).returncode == 0
    try:
        yield
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


@contextlib.contextmanager
def ground(kind: str, folder: Path) -> Iterator[Ground]:
    """Yield a cluster of this kind, with disks that can be filled."""
    with contextlib.ExitStack() as stack:
        made = Ground(kind, folder)
        for place in (made.scratch, made.runs):
            stack.enter_context(disk(place))
        if kind == "standalone":
            with made.environment():
                made.master = stack.enter_context(clusters.standalone())
        stack.callback(made.close)
        yield made


class Grounds:
    """One ground at a time, of the kind requested last, which its rounds share."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = contextlib.ExitStack()
        self._here: Ground | None = None

    def on(self, kind: str) -> Ground:
        """Return the ground of this kind."""
        if self._here is None or self._here.kind != kind:
            self.close()
            self._here = self._stack.enter_context(ground(kind, self._folder / kind))
        return self._here

    def close(self) -> None:
        """Close the ground, if any."""
        self._here = None
        self._stack.close()
