"""The real clusters that the tests run on, and how a test reaches one.

A process can hold one classic SparkContext, so every kind of cluster but `local` has a pytest process of its own: the
main one sends it the ids of the tests to run there and shows the reports that it returns (`Elsewhere`), as
pytest-xdist does. Tests run one at a time, in order; they share only the cluster's session.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

KINDS = ("local", "local-cluster", "standalone", "connect")  # the contract holds on these four
CONTRACT = os.environ.get("TRITIUM_KINDS", " ".join(KINDS)).split()  # and, in `make managers`, on a cluster manager's
# By request: simulated GPUs; the first GPU of this machine; dynamic allocation; Workers.kill; four slots of a device;
# cluster managers of several hosts (yarn_cluster.py, kubernetes_cluster.py); a Kubernetes instead of a session on it.
EXTRA = ("standalone-gpus", "real-gpu", "dynamic", "breakable", "pretended-device")
EXTRA += ("yarn", "yarn-bare", "kubernetes", "kubernetes-connect", "kubernetes-bare")
# Simulated GPUs of which the session's tasks have none: with fixed executors, with dynamic allocation, over Connect.
EXTRA += ("gpus-of-executors", "gpus-dynamic", "gpus-connect")
KIND = os.environ.get("TRITIUM_CLUSTER", "local")  # what this process runs on

# Without the second compiler and its profiles, JVMs that live a minute take half the processor time.
SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"

COMMON = {
    # As in the process that has started this one, see `use_in_jvms`: with the archive for the driver alone, a launch
    # would wait in vain for executors that take twice as long.
    "spark.executor.extraJavaOptions": os.environ.get("SPARK_SUBMIT_OPTS", SHORT_LIVED),
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "4",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.log.level": "ERROR",
    "spark.scheduler.maxRegisteredResourcesWaitingTime": "20s",  # 5 s pass before there are executors, on idle cores
    # Of the whole run, for example TRITIUM_TEST_CONF="spark.tritium.inside=-jvm_bytes".
    **dict(pair.split("=", 1) for pair in os.environ.get("TRITIUM_TEST_CONF", "").split()),
}


def use_in_jvms(options: str) -> None:
    """Let every JVM of Spark's that starts from now on have these options."""
    os.environ.update(SPARK_LAUNCHER_OPTS=options, SPARK_SUBMIT_OPTS=options, SPARK_DAEMON_JAVA_OPTS=options)
    COMMON["spark.executor.extraJavaOptions"] = options


# Remote shuffle blocks are read in small pieces, so that a test can interrupt; a lost file is retried quickly.
READS = {"spark.reducer.maxSizeInFlight": "256k", "spark.shuffle.io.retryWait": "1s"}
SMALL = {"spark.executor.memory": "512m", "spark.executor.cores": "1"}
# How a worker learns which GPUs it has: simulated ones, and the first one of this machine.
SIMULATED = """echo '{"name": "gpu", "addresses": ["0", "1"]}'"""
FIRST = (
    """echo '{"name": "gpu", "addresses": ["'$(nvidia-smi --query-gpu=index --format=csv,noheader | head -n 1)'"]}'"""
)


@contextlib.contextmanager
def session(kind: str) -> Iterator[Any]:
    """Yield a SparkSession on a new cluster of this kind; both are stopped afterwards."""
    with STARTERS[kind]() as spark:
        yield spark


def classic(master: str, **conf: str) -> Any:
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(master).appName("tritium-tests")
    for key, value in {**COMMON, **conf}.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


@contextlib.contextmanager
def _local() -> Iterator[Any]:
    from pyspark.java_gateway import ensure_callback_server_started

    # Most tests that score run here, and each Python worker of theirs would take 2 s for torch (lean/sitecustomize.py).
    spark = classic("local[2]", **{"spark.executorEnv.TRITIUM_TEST_IMPORTS": "torch"})
    # The first listener or foreachBatch in Python opens its port, which stays as long as the session.
    ensure_callback_server_started(spark.sparkContext._gateway)
    yield spark
    spark.stop()


@contextlib.contextmanager
def _pretended_device() -> Iterator[Any]:
    """Yield a session of four slots that try a task four times, and for which `cpu:0` counts as an accelerator."""
    spark = classic("local[4,4]", **{"spark.executorEnv.TRITIUM_PRETENDED_DEVICES": "cpu:0"})
    yield spark
    spark.stop()


@contextlib.contextmanager
def _local_cluster(slots: str = "2,1,1024", **conf: str) -> Iterator[Any]:
    from pyspark.find_spark_home import _find_spark_home

    spark = classic(f"local-cluster[{slots}]", **conf)
    folder = Path(_find_spark_home(), "work", spark.sparkContext.applicationId)
    yield spark
    spark.stop()
    shutil.rmtree(folder, ignore_errors=True)  # Spark leaves it in its own home


@contextlib.contextmanager
def _dynamic() -> Iterator[Any]:
    """Yield a session on two workers of one core each with dynamic allocation; two pools share them fairly."""
    conf = {
        "spark.dynamicAllocation.enabled": "true",
        "spark.dynamicAllocation.shuffleTracking.enabled": "true",
        "spark.dynamicAllocation.maxExecutors": "2",
        "spark.scheduler.mode": "FAIR",
    }
    with standalone() as master:
        spark = classic(master, **SMALL, **conf)
        yield spark
        spark.stop()


@contextlib.contextmanager
def _standalone(**conf: str) -> Iterator[Any]:
    with standalone() as master, joined(master, **conf) as spark:
        yield spark


@contextlib.contextmanager
def _breakable() -> Iterator[Any]:
    decommission = {"spark.decommission.enabled": "true"}
    with standalone(**decommission) as master, joined(master, **decommission) as spark:
        yield spark


@contextlib.contextmanager
def joined(master: str, **conf: str) -> Iterator[Any]:
    """Yield a SparkSession on an existing standalone cluster of two workers."""
    spark = classic(master, **SMALL, **conf)
    status = spark.sparkContext._jsc.sc().getExecutorMemoryStatus
    wait(lambda: status().size() == 3, "two executors have registered")
    yield spark
    spark.stop()


@contextlib.contextmanager
def _master_of_gpus(workers: int, gpus: int, lists: str = SIMULATED) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the URL of a master, and an application's settings, on workers of so many GPUs and cores each.

    lists : the shell command that names the GPUs.
    """
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "gpus.sh")
        script.write_text(f"#!/bin/sh\n{lists}\n")
        script.chmod(0o755)
        worker = {
            "spark.worker.resource.gpu.amount": str(gpus),
            "spark.worker.resource.gpu.discoveryScript": str(script),
        }
        with standalone(workers, cores=gpus, **worker) as master:
            own = {"spark.executor.resource.gpu.amount": str(gpus), "spark.executor.cores": str(gpus)}
            yield master, {**SMALL, **own}


@contextlib.contextmanager
def _standalone_gpus(workers: int = 2, gpus: int = 2, lists: str = SIMULATED, of_a_task: str = "1") -> Iterator[Any]:
    """Yield a session on workers of so many GPUs and cores each; `of_a_task`: "" leaves its tasks without any."""
    with _master_of_gpus(workers, gpus, lists) as (master, conf):
        spark = classic(master, **conf, **({"spark.task.resource.gpu.amount": of_a_task} if of_a_task else {}))
        status = spark.sparkContext._jsc.sc().getExecutorMemoryStatus
        wait(lambda: status().size() == workers + 1, f"{workers} executor(s) have registered")
        yield spark
        spark.stop()


@contextlib.contextmanager
def _gpus_dynamic() -> Iterator[Any]:
    """Yield a session with dynamic allocation of one executor of each profile, on two workers of two GPUs."""
    with _master_of_gpus(2, 2) as (master, conf):
        spark = classic(
            master,
            **conf,
            **{
                "spark.dynamicAllocation.enabled": "true",
                "spark.dynamicAllocation.shuffleTracking.enabled": "true",
                "spark.dynamicAllocation.maxExecutors": "1",
            },
        )
        yield spark
        spark.stop()


@contextlib.contextmanager
def _gpus_connect() -> Iterator[Any]:
    """Yield a client session of a server whose one executor has two GPUs."""
    from pyspark.sql import SparkSession

    with _master_of_gpus(1, 2) as (master, conf), connect_server(master, **conf) as url:
        spark = SparkSession.builder.remote(url).create()
        yield spark
        spark.stop()


@contextlib.contextmanager
def _connect() -> Iterator[Any]:
    """Yield a client session of a server in its own process: the driver has no JVM."""
    from pyspark.sql import SparkSession

    with connect_server() as url:
        spark = SparkSession.builder.remote(url).create()
        yield spark
        spark.stop()


@contextlib.contextmanager
def _yarn() -> Iterator[Any]:
    """Yield a client-mode session of two executors on a YARN of two hosts."""
    import yarn_cluster

    with yarn_cluster.yarn() as cluster, cluster.chosen(), cluster.session() as spark:
        yield spark


@contextlib.contextmanager
def _yarn_bare() -> Iterator[Any]:
    """Yield a YARN of two hosts, on which the tests make sessions in this process's JVM."""
    from pyspark import SparkContext

    import yarn_cluster

    with yarn_cluster.yarn() as cluster, cluster.chosen():
        SparkContext._ensure_initialized()
        yield cluster


@contextlib.contextmanager
def connect_server(master: str = "local[2]", **settings: str) -> Iterator[str]:
    """Yield the URL of a real Spark Connect server."""
    port = free_port()
    conf = {
        **COMMON,
        "spark.connect.grpc.binding.port": str(port),
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.driver.maxResultSize": "64m",  # limits what a gang with its coordinator on an executor returns
        **settings,
    }
    server = [spark_script("spark-submit"), "--master", master, "--driver-memory", "1g"]
    for key, value in conf.items():
        server += ["--conf", f"{key}={value}"]
    server += ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer"]
    with daemon("connect server", server) as process:
        wait(lambda: listens(port) or process.poll() is not None, f"the Connect server listens on port {port}")
        yield f"sc://127.0.0.1:{port}"


@contextlib.contextmanager
def _kubernetes() -> Iterator[Any]:
    """Yield a session whose two executors are pods, each on a node of its own; skips the test where there is none."""
    from kubernetes_cluster import kubernetes

    with kubernetes() as cluster, in_pods(cluster) as spark:
        yield spark


@contextlib.contextmanager
def _kubernetes_connect() -> Iterator[Any]:
    """Yield a client session of a server whose executors are two pods."""
    from pyspark.sql import SparkSession

    from kubernetes_cluster import kubernetes

    with kubernetes() as cluster:
        conf = {**SMALL, **cluster.client_conf(), "spark.scheduler.minRegisteredResourcesRatio": "1"}
        with connect_server(f"k8s://{cluster.url}", **conf) as url:
            spark = SparkSession.builder.remote(url).create()
            yield spark
            spark.stop()


@contextlib.contextmanager
def _kubernetes_bare() -> Iterator[Any]:
    """Yield a running Kubernetes with its gang scheduling, on which the tests make sessions in this process's JVM."""
    from pyspark import SparkContext

    from kubernetes_cluster import kubernetes

    gangs = "GenericWorkload=true,GangScheduling=true"
    with kubernetes(gangs, "scheduling.k8s.io/v1alpha1=true") as cluster:
        SparkContext._ensure_initialized()
        yield cluster


@contextlib.contextmanager
def in_pods(cluster: Any, ready: int | None = None, **conf: str) -> Iterator[Any]:
    """Yield a session on a running Kubernetes (kubernetes_cluster.py), when so many of its executors have registered.

    ready : None: all.
    """
    settings = {**SMALL, **cluster.client_conf(), **conf}
    with registered(f"k8s://{cluster.url}", settings, ready) as spark:
        yield spark


@contextlib.contextmanager
def registered(master: str, settings: dict[str, str], ready: int | None = None) -> Iterator[Any]:
    """Yield a session whose executors have registered, and put back what PySpark changes in this process.

    ready : so many of them, None: all.
    """
    path, handler = list(sys.path), signal.getsignal(signal.SIGINT)
    spark = classic(master, **settings)
    status, executors = spark.sparkContext._jsc.sc().getExecutorMemoryStatus, int(settings["spark.executor.instances"])
    wait(lambda: status().size() > (executors if ready is None else ready), "its executors have registered")
    try:
        yield spark
    finally:
        spark.stop()
        sys.path[:] = path
        signal.signal(signal.SIGINT, handler)


STARTERS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "local": _local,
    "local-cluster": functools.partial(_local_cluster, **READS),
    "standalone": _standalone,
    "connect": _connect,
    "standalone-gpus": _standalone_gpus,
    "real-gpu": functools.partial(_standalone_gpus, workers=1, gpus=1, lists=FIRST),
    "gpus-of-executors": functools.partial(_standalone_gpus, of_a_task=""),
    "gpus-dynamic": _gpus_dynamic,
    "gpus-connect": _gpus_connect,
    "breakable": _breakable,
    "dynamic": _dynamic,
    "pretended-device": _pretended_device,
    "yarn": _yarn,
    "yarn-bare": _yarn_bare,
    "kubernetes": _kubernetes,
    "kubernetes-connect": _kubernetes_connect,
    "kubernetes-bare": _kubernetes_bare,
}


@contextlib.contextmanager
def standalone(workers: int = 2, cores: int = 1, **worker_conf: str) -> Iterator[str]:
    """Yield the URL of a real Master with Workers of `cores` cores each."""
    port = free_port()
    url = f"spark://127.0.0.1:{port}"
    spark_class = spark_script("spark-class")
    master = [
        "org.apache.spark.deploy.master.Master",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--webui-port",
        "0",
    ]
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="standalone-"))
        stack.enter_context(daemon("master", [spark_class, *master]))
        wait(lambda: listens(port), f"the master listens on port {port}")
        Workers.here = Workers(url, folder, cores, worker_conf, stack)
        for _ in range(workers):
            Workers.here.start()
        yield url


class Workers:
    """The workers of this process's standalone cluster, for tests that kill one."""

    here: Workers

    def __init__(self, url: str, folder: str, cores: int, conf: dict[str, str], stack: contextlib.ExitStack) -> None:
        self.folder = Path(folder)
        self._url, self._cores, self._stack = url, cores, stack
        self._properties = Path(folder, "worker.conf")
        self._properties.write_text("".join(f"{key} {value}\n" for key, value in conf.items()))
        self.processes: list[subprocess.Popen[Any]] = []

    def start(self) -> None:
        """Start one more worker."""
        number = len(self.processes)
        command = [spark_script("spark-class"), "org.apache.spark.deploy.worker.Worker", "--host", "127.0.0.1"]
        command += ["--webui-port", "0", "-c", str(self._cores), "-m", "1g", "--work-dir", f"{self.folder}/{number}"]
        command += ["--properties-file", str(self._properties), self._url]
        self.processes.append(
            self._stack.enter_context(daemon(f"worker {number}", command, self.folder / f"{number}.log"))
        )

    def take_away(self, number: int = -1) -> None:
        """Announce that a worker's host is taken away, as agents of clouds do: its executors are decommissioned."""
        self.processes[number].send_signal(signal.SIGPWR)

    def kill(self, number: int = -1) -> None:
        """Kill a worker (by default the newest) with its executors and all their processes, like a power failure."""
        worker = psutil.Process(self.processes[number].pid)
        for process in [worker, *worker.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.processes[number].wait()


@contextlib.contextmanager
def daemon(name: str, command: list[str], log: Path | None = None) -> Iterator[subprocess.Popen[Any]]:
    """Yield a process that lives as long as the block; its output is printed when the block fails."""
    with contextlib.ExitStack() as stack:
        log = log or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="standalone-")), "log")
        with log.open("w") as output:  # not held open: the leak check of a test that starts a worker would name it
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            yield process
        except BaseException:
            print(f"--- {name} (exit code {process.poll()}):\n{log.read_text()[-4000:]}", file=sys.stderr)
            raise
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def spark_script(name: str) -> str:
    from pyspark.find_spark_home import _find_spark_home

    return str(Path(_find_spark_home(), "bin", name))


def free_port() -> int:
    with socket.socket() as placeholder:
        placeholder.bind(("127.0.0.1", 0))
        port: int = placeholder.getsockname()[1]
        return port


def listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def listening() -> set[int]:
    """Return the ports on which this process listens. Any other may have got one that is free again."""
    found = psutil.Process().net_connections("tcp")
    return {connection.laddr.port for connection in found if connection.status == psutil.CONN_LISTEN}


@contextlib.contextmanager
def set_to(spark: Any, **settings: str) -> Iterator[None]:
    """Set what the session has under these names, and then what it had."""
    before = {key: spark.conf.get(key, None) for key in settings}
    for key, value in settings.items():
        spark.conf.set(key, value)
    try:
        yield
    finally:
        for key, old in before.items():
            spark.conf.unset(key) if old is None else spark.conf.set(key, old)


def wait(condition: Callable[[], bool], what: str, seconds: float = 120.0) -> None:
    """Poll until `condition` holds, as processes don't notify. Raises TimeoutError, which names `what`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"after {seconds:.0f} s it is still not so that {what}")
        time.sleep(0.05)


class Elsewhere:
    """A pytest process on another kind of cluster. `run` runs a test there and returns its reports."""

    def __init__(self, kind: str, files: list[str], root: Path, options: list[str]) -> None:
        self.kind = kind
        requests, self._requests = os.pipe()
        self._answers, answers = os.pipe()
        env = {**os.environ, "TRITIUM_CLUSTER": kind, "TRITIUM_TEST_PIPES": f"{requests},{answers}"}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
        command += ["--rootdir", str(root)]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in close()
        self._process = subprocess.Popen(
            [*command, *options, *files],
            cwd=root,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            pass_fds=(requests, answers),
            start_new_session=True,
        )
        os.close(requests)
        os.close(answers)
        self._buffer = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def run(self, nodeid: str, following: str | None, seconds: float) -> list[dict[str, Any]]:
        """Return one test's serialized reports. Raises RuntimeError with the output of a process that ends or hangs."""
        reports: list[dict[str, Any]] = []
        deadline = time.monotonic() + seconds
        with contextlib.suppress(BrokenPipeError):
            os.write(self._requests, json.dumps([nodeid, following]).encode() + b"\n")
        while True:
            line = self._line(deadline)
            if line is None:
                raise RuntimeError(f"the pytest process for {self.kind!r} {self._fate(deadline)}:\n{self._tail()}")
            if line == b"done":
                return reports
            reports.append(json.loads(line))

    def _line(self, deadline: float) -> bytes | None:
        while b"\n" not in self._buffer:
            ready = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))[0]
            data = os.read(self._answers, 1 << 20) if ready else b""
            if not data:
                return None
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        return line

    def _fate(self, deadline: float) -> str:
        if time.monotonic() >= deadline:
            return "did not answer in time"
        return f"ended with exit code {self._process.wait()}"

    def _tail(self) -> str:
        self._log.seek(0)
        return self._log.read()[-6000:]

    def close(self) -> None:
        """Close the requests, at whose end the process stops its cluster and exits."""
        os.close(self._requests)
        os.close(self._answers)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with contextlib.suppress(ProcessLookupError):  # a process that crashed may leave parts of its cluster
            os.killpg(self._process.pid, signal.SIGKILL)
        self._log.close()
