"""A real S3 server for tests, in a process of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

import clusters


@contextlib.contextmanager
def server() -> Iterator[str]:
    """Yield the address of a server, stopped afterwards."""
    port = clusters.free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            clusters.wait(lambda: clusters.listens(port) or process.poll() is not None, "the S3 server listens")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def bucket(address: str) -> dict[str, str]:
    """Return the variables by which a program finds the server, after making s3://bucket on it."""
    keys = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any", "AWS_DEFAULT_REGION": "us-east-1"}
    env = {**keys, "AWS_ENDPOINT_URL": address}
    make = "import s3fs; s3fs.S3FileSystem().mkdir('bucket')"
    subprocess.run([sys.executable, "-c", make], env={**os.environ, **env}, check=True, timeout=100)
    return env
