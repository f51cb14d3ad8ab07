"""The command that a backend of Flyte's runs in a task's pod, run here: spark-submit of Flyte's runtime."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workflows import FOLDER, SECONDS, Place

_IDS = {
    "FLYTE_INTERNAL_EXECUTION_PROJECT": "p",
    "FLYTE_INTERNAL_EXECUTION_DOMAIN": "d",
    "_U_ORG_NAME": "o",
    "_U_EP_OVERRIDE": "localhost:1",  # the control plane, which a task without tasks of its own never calls
}


def start(command: list[str], environment: dict[str, str], cwd: Path) -> subprocess.Popen[str]:
    """Start a pod's command as the leader of a process group; its output is one text."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "start_new_session": True}
    return subprocess.Popen(command, env=environment, cwd=cwd, text=True, **pipes)


def finish(process: subprocess.Popen[str]) -> str:
    """Return the output of a command of `start` when all is at its end. One that fails to end in time is killed."""
    with process:
        try:
            return process.communicate(timeout=SECONDS)[0]
        except BaseException:
            # The whole group: the Python program of spark-submit outlives its Java, and would hold the output open.
            os.killpg(process.pid, signal.SIGKILL)
            raise


@dataclass
class Ended:
    """What a pod has left. `error`: kind, code and origin of error.pb; None where there is none."""

    code: int
    log: str
    outputs: dict[str, Any] | None
    error: dict[str, str] | None
    report: str


@dataclass
class Pod:
    """One attempt's command: `args` from the task's template, its environment, and where it writes."""

    args: list[str]
    environment: dict[str, str]
    out: str
    cwd: Path

    def start(self) -> subprocess.Popen[str]:
        return start(self.args, self.environment, self.cwd)

    def run(self) -> Ended:
        """Run the command to its end."""
        process = self.start()
        log = finish(process)
        return self.ended(process.returncode, log)

    def ended(self, code: int, log: str) -> Ended:
        """Return what the pod has written."""
        asked = [sys.executable, str(FOLDER / "wire.py"), "read", self.out]
        done = subprocess.run(asked, env=self.environment, capture_output=True, text=True, check=False, timeout=SECONDS)
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        return Ended(code, log, answer["outputs"], answer["error"], answer["report"])


def pod(
    place: Place,
    name: str,
    *inputs: str,
    flow: str = "basics",
    master: str = "local[2]",
    store: str = "",
    conf: Mapping[str, str] | None = None,
    **environment: str,
) -> Pod:
    """Return the pod of a task of a workflow in tests/flyte.

    inputs : the arguments `name=expression`, in the workflow's module.
    master : of spark-submit; on a cluster Spark's operator gives it.
    store  : where it writes; "": the place.
    conf   : more of Spark's settings, as an operator's defaults are.
    """
    from pyspark.find_spark_home import _find_spark_home

    folder = place.folder / f"pod-{len(list(place.folder.glob('pod-*')))}-{name}"
    (folder / "out").mkdir(parents=True)
    store = store or str(place.folder)
    env = place.environment(**_IDS, _U_RUN_BASE=f"{store}/base", **environment)
    asked = [sys.executable, str(FOLDER / "wire.py"), "write", flow, name, str(folder), store, *inputs]
    done = subprocess.run(
        asked, env=env, cwd=place.folder / "cwd", capture_output=True, text=True, check=False, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr
    template = json.loads(done.stdout.splitlines()[-1])
    settings = {**(conf or {}), **template["conf"]}
    options = [text for pair in settings.items() for text in ("--conf", "=".join(pair))]
    submit = [f"{_find_spark_home()}/bin/spark-submit", "--master", master, *options, template["main"]]
    return Pod([*submit, *template["args"]], env, f"{store}/{folder.name}/out", place.folder / "cwd")
