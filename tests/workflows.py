"""Workflows of Flyte's for tests: each in a process of its own, with a home, a cache and data of its own."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "flyte"
SECONDS = 600.0


@dataclass
class Played:
    """What a process has said. `answers`: of its tasks, in order; `jvm`: whether it has started one."""

    answers: list[dict[str, Any]] = field(default_factory=list)
    jvm: bool = False
    text: str = ""
    code: int = 0

    def outputs(self, number: int = 0) -> list[Any]:
        assert "outputs" in self.answers[number], self.answers[number]["text"]
        values: list[Any] = self.answers[number]["outputs"]
        return values


class Place:
    """Where one test's workflows run: home, cache, data."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("home", "tmp", "cwd"):
            (folder / name).mkdir()

    def environment(self, **more: str) -> dict[str, str]:
        """Return the environment of a process. Flyte's telemetry is off."""
        python = os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")])
        own = {"HOME": str(self.folder / "home"), "TMPDIR": str(self.folder / "tmp"), "DO_NOT_TRACK": "1"}
        return {**os.environ, **own, "PYTHONPATH": python, "TRITIUM_RUNS": str(self.folder / "runs"), **more}

    def start(self, flow: Path, calls: list[tuple[str, list[str]]], **environment: str) -> subprocess.Popen[str]:
        """Start the process that plays these tasks; arguments are expressions in the flow's module."""
        command = [sys.executable, str(FOLDER / "play.py"), str(flow), str(self.folder), json.dumps(calls)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen(
            command, cwd=self.folder / "cwd", env=self.environment(**environment), text=True, **pipes
        )

    def play(self, flow: Path, calls: list[tuple[str, list[str]]], **environment: str) -> Played:
        """Play these tasks, and return their answers."""
        with self.start(flow, calls, **environment) as process:
            try:
                text, _ = process.communicate(timeout=SECONDS)
            finally:
                process.kill()
        lines = text.splitlines()
        answers = [json.loads(line.partition(" ANSWER ")[2]) for line in map(" {}".format, lines) if " ANSWER " in line]
        assert len(answers) == len(calls), text[-6000:]
        return Played(answers, any(line.endswith("JVM True") for line in lines), text, process.returncode)

    def runs(self) -> list[tuple[str, bool, int]]:
        """Return (task, whether it came from the cache, attempts) of every task so far, in order."""
        with sqlite3.connect(self.folder / "home" / ".flyte" / "local-cache" / "cache.db") as cache:
            rows = cache.execute(
                "select task_name, cache_hit, attempt_count from runs where action_name != 'a0' order by start_time"
            ).fetchall()
        cache.close()
        return [(str(task), bool(hit), int(attempts)) for task, hit, attempts in rows]

    def reports(self) -> list[str]:
        """Return the reports that there are."""
        return [path.read_text() for path in sorted(self.folder.rglob("report.html"))]
