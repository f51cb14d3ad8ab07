"""A server of MLflow's, for tests."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx


@contextmanager
def answering(arguments: list[str], path: str, folder: Path) -> Iterator[str]:
    """Yield the URL of a server of MLflow's, `mlflow ARGUMENTS`, that answers at a path."""
    with socket.socket() as probe:  # MLflow takes no port 0.
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", *arguments, "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    beside = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "TMPDIR": str(folder),
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # Its processes outlive a server that is ended.
    }
    process = subprocess.Popen(
        command,
        env={**os.environ, **beside},
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=(errors := (folder / "errors").open("w")),
    )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(1500):
            assert process.poll() is None, (folder / "errors").read_text()
            try:
                if httpx.get(f"{url}{path}").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.2)  # The server tells nobody when it listens.
        yield url
    finally:
        os.killpg(process.pid, 15)
        process.wait(120)
        errors.close()
