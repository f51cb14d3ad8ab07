"""Programs that run in turn in one process, each as `python program.py` does: they share its imports and its JVM.

A session of Spark's is each program's own. What costs is the start of a JVM: nine examples take 60 s of processor time
less than in processes of their own.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path


class Programs:
    """A process that runs programs, until `close`; what it says goes to a log in `folder`."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._log = folder / "log"
        with self._log.open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
            )

    def run(self, path: Path, folder: Path) -> str:
        """Run a program in a directory, and return what it printed. Raises AssertionError with its traceback."""
        assert self._process.stdin
        assert self._process.stdout
        print(json.dumps([str(path), str(folder), str(folder / "stdout")]), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        assert line, f"the process has ended:\n{self._said()}"
        printed = (folder / "stdout").read_text()
        error = json.loads(line)
        assert not error, f"{error}\n{printed}\n{self._said()}"
        return printed

    def _said(self) -> str:
        return self._log.read_text()[-4000:]

    def close(self) -> None:
        """End the process, which must end by itself."""
        with self._process:
            try:
                assert self._process.stdin
                self._process.stdin.close()
                assert self._process.wait(60) == 0, self._said()
            finally:
                self._process.kill()


def _run(path: str, folder: str, printed: str) -> str:
    """Run a program in this process, and leave the process as it was. Returns the traceback of its error."""
    from pyspark.sql import SparkSession

    environment, modules = dict(os.environ), sys.path[1:]
    os.chdir(folder)
    sys.argv[:], sys.path[0] = [path], str(Path(path).parent)
    sys.stdout.flush()
    with open(printed, "w") as file:
        os.dup2(file.fileno(), 1)
    error = ""
    try:
        runpy.run_path(path, run_name="__main__")
    except BaseException:  # noqa: BLE001 - also an exit: the test shows it
        error = traceback.format_exc()
    if session := SparkSession.getActiveSession():  # a program may leave it to the end of its process
        session.stop()
    sys.stdout.flush()
    os.dup2(2, 1)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[1:] = modules
    return error


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a program prints is not an answer
    for request in sys.stdin:
        print(json.dumps(_run(*json.loads(request))), file=answers, flush=True)
