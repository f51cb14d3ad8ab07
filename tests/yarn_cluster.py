"""A real YARN for tests: a ResourceManager and NodeManagers, each with an address of 127.0.0.0/8 as a host of its own.

Jars are fetched once by Maven, as Kafka's are. All ports are free ones, all files are in one temporary directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from broker import free_ports, jars
from clusters import COMMON, SHORT_LIVED, daemon, registered, spark_script, wait

SPARK_JARS = Path(spark_script("spark-class")).parents[1] / "jars"
POM = Path(__file__).parent / "yarn" / "pom.xml"
SERVER = "org.apache.hadoop.yarn.server"
CALCULATOR = "org.apache.hadoop.yarn.util.resource.DominantResourceCalculator"  # which also counts cores and GPUs
PORTS = ("scheduler", "resource-tracker", "", "admin", "webapp")  # of the ResourceManager
QUEUES = {"default": 60, "gangs": 40}  # percent of the cluster, and each may take all of it
MASTER = "org.apache.spark.deploy.yarn.ExecutorLauncher"  # the ApplicationMaster of client mode
EXECUTOR = "org.apache.spark.executor.YarnCoarseGrainedExecutorBackend"
GPUS = 2  # of each host, pretended: YARN counts them, and the session's discovery script names them
EXPIRY_SECONDS = 20  # without a sign of life a NodeManager counts as lost; YARN's default is 600


class Yarn:
    """A running YARN of hosts 127.0.0.2, 127.0.0.3, and so on."""

    def __init__(self, folder: Path, ports: list[int], stack: contextlib.ExitStack) -> None:
        self.folder, self._stack = folder, stack
        self.conf = folder / "conf"
        self.nodes: list[psutil.Process] = []
        self._api = f"http://127.0.0.1:{ports[PORTS.index('webapp')]}/ws/v1/cluster/"
        site = {
            "yarn.resourcemanager.hostname": "127.0.0.1",
            **{
                f"yarn.resourcemanager{f'.{name}' * bool(name)}.address": f"127.0.0.1:{port}"
                for name, port in zip(PORTS, ports, strict=True)
            },
            "yarn.scheduler.capacity.root.queues": ",".join(QUEUES),
            **{f"yarn.scheduler.capacity.root.{name}.capacity": part for name, part in QUEUES.items()},
            **{f"yarn.scheduler.capacity.root.{name}.maximum-capacity": 100 for name in QUEUES},
            **{f"yarn.scheduler.capacity.root.{name}.user-limit-factor": 3 for name in QUEUES},
            "yarn.scheduler.capacity.resource-calculator": CALCULATOR,
            "yarn.scheduler.capacity.maximum-am-resource-percent": 0.5,
            "yarn.scheduler.minimum-allocation-mb": 256,
            "yarn.nm.liveness-monitor.expiry-interval-ms": EXPIRY_SECONDS * 1000,
            "yarn.resourcemanager.nm.liveness-monitor.interval-ms": 1000,
            "yarn.nodemanager.resource.memory-mb": 4096,  # one executor of `settings` a host, and the ApplicationMaster
            "yarn.nodemanager.vmem-check-enabled": "false",
            "yarn.nodemanager.resource.memory.enforced": "false",  # by cgroups, which only LinuxContainerExecutor has
            "yarn.nodemanager.disk-health-checker.enable": "false",  # a disk of the machine that is 90 % full
        }
        for name, properties in {
            "yarn-site": site,
            "resource-types": {"yarn.resource-types": "yarn.io/gpu"},
            "node-resources": {"yarn.nodemanager.resource-type.yarn.io/gpu": GPUS},
        }.items():
            write_site(self.conf / f"{name}.xml", properties)
        self._start("resourcemanager.ResourceManager", "resourcemanager")
        for number in (2, 3):
            self.start_node(f"127.0.0.{number}")
        wait(lambda: self.active() == 2, "two NodeManagers run")

    def start_node(self, host: str) -> None:
        """Start a NodeManager with this address."""
        own = {
            "hostname": host,
            **dict.fromkeys(("address", "localizer.address", "webapp.address"), f"{host}:0"),
            **{f"{key}-dirs": self.folder / host / key for key in ("local", "log")},
        }
        options = [word for key, value in own.items() for word in ("-D", f"yarn.nodemanager.{key}={value}")]
        process = self._start("nodemanager.NodeManager", host, *options)
        self.nodes.append(process)
        self._stack.callback(kill_tree, process)

    def kill_node(self, number: int) -> None:
        """Kill a NodeManager with its containers and all their processes, like a power failure."""
        kill_tree(self.nodes[number])

    def containers(self, main_class: str) -> list[psutil.Process]:
        """Return the JVMs that run this class in containers."""
        found = []
        for node in self.nodes:
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in node.children(recursive=True):
                    if process.name() == "java" and main_class in process.cmdline():
                        found.append(process)
        return found

    def ask(self, path: str) -> Any:
        """Return the ResourceManager's answer to a question of its REST interface."""
        with urllib.request.urlopen(self._api + path, timeout=10) as answer:
            return json.load(answer)

    def active(self) -> int:
        with contextlib.suppress(OSError):
            return int(self.ask("metrics")["clusterMetrics"]["activeNodes"])
        return 0

    def settings(self, **conf: str) -> dict[str, str]:
        """Return the settings of an application of two executors, whose jars are the driver's."""
        java = Path(os.path.realpath(str(shutil.which("java")))).parents[1]
        passed = {key: value for key, value in os.environ.items() if key.startswith("TRITIUM_")}  # YARN passes few
        return {
            **COMMON,
            **{f"spark.executorEnv.{key}": value for key, value in passed.items()},
            "spark.executorEnv.JAVA_HOME": str(java),
            "spark.yarn.appMasterEnv.JAVA_HOME": str(java),
            "spark.yarn.jars": f"local:{SPARK_JARS}/*",
            "spark.yarn.stagingDir": f"file://{self.folder}/staging",
            "spark.yarn.am.memory": "512m",
            "spark.executor.instances": "2",
            "spark.executor.memory": "512m",
            "spark.executor.memoryOverhead": "2g",
            **conf,
        }

    @contextlib.contextmanager
    def chosen(self) -> Iterator[None]:
        """Let Spark find this cluster while the block runs."""
        name = "HADOOP_CONF_DIR"
        before = os.environ.get(name)
        os.environ[name] = str(self.conf)
        try:
            yield
        finally:
            os.environ.pop(name) if before is None else os.environ.update({name: before})

    @contextlib.contextmanager
    def session(self, **conf: str) -> Iterator[Any]:
        """Yield a client-mode session whose two executors have registered."""
        with registered("yarn", self.settings(**conf)) as spark:
            yield spark

    def _start(self, main_class: str, name: str, *options: str) -> psutil.Process:
        classes = f"{self.conf}:{jars('yarn', POM)}/*:{SPARK_JARS}/*"  # without Spark's they fail silently
        command = ["java", "-Xmx256m", *SHORT_LIVED.split(), f"-Djava.io.tmpdir={self.folder}", "-cp", classes]
        log = self.folder / f"{name}.log"
        process = self._stack.enter_context(daemon(name, [*command, f"{SERVER}.{main_class}", *options], log))
        return psutil.Process(process.pid)


@contextlib.contextmanager
def yarn() -> Iterator[Yarn]:
    """Yield a YARN of two hosts. All its processes are gone afterwards."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="yarn-", ignore_cleanup_errors=True)))
        ports = stack.enter_context(free_ports(len(PORTS)))
        yield Yarn(folder, ports, stack)


def write_site(file: Path, properties: dict[str, Any]) -> None:
    """Write a file of settings of Hadoop's."""
    file.parent.mkdir(exist_ok=True)
    lines = [f"<property><name>{key}</name><value>{value}</value></property>" for key, value in properties.items()]
    file.write_text("\n".join(["<configuration>", *lines, "</configuration>"]))


def kill_tree(process: psutil.Process) -> None:
    """Kill a process with all its descendants."""
    with contextlib.suppress(psutil.NoSuchProcess):
        tree = [process, *process.children(recursive=True)]
        for one in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(tree, 5)
