"""A real Kafka broker (KRaft, one node) for tests, and the jars that Spark needs to talk to it."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusters import SHORT_LIVED

POM = Path(__file__).parent / "kafka" / "pom.xml"
CACHE = Path.home() / ".cache" / "tritium-tests"
SECONDS = 60.0  # for the broker to answer; 2 on a quiet machine

PROPERTIES = """
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
log.dirs={logs}
num.partitions=2
offsets.topic.num.partitions=1
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
group.initial.rebalance.delay.ms=0
"""


def jars(profile: str, pom: Path = POM) -> Path:
    """Return the folder with the jars of one profile of a pom, fetched once and kept outside the repository."""
    folder = CACHE / f"{profile}-{uuid.uuid5(uuid.NAMESPACE_OID, pom.read_text())}"
    if folder.exists():
        return folder
    maven = shutil.which("mvn")
    if maven is None:
        pytest.skip("The jars are fetched by Maven, and there is no mvn (Debian: apt-get install maven)")
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as beside:
        command = [maven, "-q", "-B", "-f", str(pom), "-P", profile, "dependency:copy-dependencies"]
        done = subprocess.run(
            [*command, f"-DoutputDirectory={beside}/jars"], capture_output=True, text=True, timeout=170, check=False
        )
        if done.returncode:
            pytest.skip(f"Maven could not fetch the jars: {(done.stdout + done.stderr)[-300:]}")
        with contextlib.suppress(FileExistsError, OSError):  # another run has made it
            Path(beside, "jars").rename(folder)
    return folder


class Broker:
    """A broker on 127.0.0.1 with a port of its own, which can be killed and started again with what it has stored."""

    def __init__(self, folder: str, port: int, controller: int) -> None:
        self.address, self._port, self._out = f"127.0.0.1:{port}", port, Path(folder, "out")
        self._config = Path(folder, "server.properties")
        self._config.write_text(PROPERTIES.format(port=port, controller=controller, logs=f"{folder}/logs"))
        self._java = ["java", "-Xmx512m", *SHORT_LIVED.split(), "-cp", f"{jars('broker')}/*"]
        storage = [*self._java, "kafka.tools.StorageTool", "format", "-t", "AAAAAAAAAAAAAAAAAAAAAQ"]
        subprocess.run([*storage, "-c", str(self._config)], check=True, capture_output=True, timeout=SECONDS)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and return when it listens."""
        with open(self._out, "wb") as out:
            self._process = subprocess.Popen([*self._java, "kafka.Kafka", str(self._config)], stdout=out, stderr=out)
        wait_for(self._process, self._port, self._out)

    def kill(self) -> None:
        """End it by SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def running_broker() -> Iterator[Broker]:
    """Yield a broker, stopped afterwards, whose topics have two partitions and are made on first use."""
    with tempfile.TemporaryDirectory() as folder, free_ports(2) as (port, controller):
        one = Broker(folder, port, controller)
        try:
            one.start()
            yield one
        finally:
            one.kill()


@contextlib.contextmanager
def broker() -> Iterator[str]:
    """Yield the address of a broker as `running_broker` does."""
    with running_broker() as one:
        yield one.address


@contextlib.contextmanager
def free_ports(count: int) -> Iterator[list[int]]:
    """Yield ports that were free a moment ago."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for taken in sockets:
            taken.bind(("127.0.0.1", 0))
        ports = [taken.getsockname()[1] for taken in sockets]
    yield ports


def wait_for(process: subprocess.Popen[bytes], port: int, out: Path) -> None:
    """Return when the process listens on the port. Raises RuntimeError with what it has printed if it does not."""
    deadline = time.monotonic() + SECONDS
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the server did not start: {out.read_text()[-2000:]}")
        time.sleep(0.1)
