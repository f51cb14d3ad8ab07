"""A training on YARN that is hit by a random fault at a random moment ends with every row counted once an epoch."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import leaks
from counted_training import hit
from yarn_cluster import EXECUTOR, EXPIRY_SECONDS, MASTER, Yarn

pytestmark = [pytest.mark.timeout(600), pytest.mark.parametrize("cluster", ["yarn-bare"], indirect=True)]

ROUNDS = int(os.environ.get("TRITIUM_FAULT_ROUNDS", "2"))
SILENT_SECONDS = EXPIRY_SECONDS + 5.0  # so that YARN counts the host as lost before it comes back


def kill_jvm(main_class: str, number: int) -> Callable[[Yarn, random.Random], None]:
    """Return a fault that sends a signal to a container's JVM."""
    return lambda cluster, chance: chance.choice(cluster.containers(main_class)).send_signal(number)


def kill_python(cluster: Yarn, chance: random.Random) -> None:
    executor = chance.choice(cluster.containers(EXECUTOR))
    pythons = [one for one in executor.children(recursive=True) if "python" in one.name()]
    chance.choice(pythons).kill()


def lose_host(cluster: Yarn, chance: random.Random) -> None:
    """Kill a host with everything on it, like a power failure, and start another one."""
    number = chance.choice([k for k, node in enumerate(cluster.nodes) if node.is_running()])
    cluster.kill_node(number)
    cluster.start_node(f"127.0.0.{len(cluster.nodes) + 2}")
    leaks.STRANGERS.add(cluster.nodes[-1].pid)  # It stays for the rounds after this one.


def silence_host(cluster: Yarn, chance: random.Random) -> None:
    """Stop all processes of a host until YARN has counted it as lost, and let them go on."""
    node = chance.choice([node for node in cluster.nodes if node.is_running()])
    stopped = [node, *node.children(recursive=True)]
    for process in stopped:
        process.suspend()
    threading.Timer(SILENT_SECONDS, resume, [stopped]).start()


def resume(processes: list[psutil.Process]) -> None:
    for process in processes:
        if process.is_running():
            process.resume()


FAULTS: dict[str, Callable[[Yarn, random.Random], None]] = {
    "a Python process is killed": kill_python,
    "the executor's JVM is killed": kill_jvm(EXECUTOR, signal.SIGKILL),
    "the container is ended by SIGTERM": kill_jvm(EXECUTOR, signal.SIGTERM),
    "the ApplicationMaster is killed": kill_jvm(MASTER, signal.SIGKILL),
    "the host is lost, and another one comes": lose_host,
    f"the host is silent for {SILENT_SECONDS:.0f} s": silence_host,
}


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_a_fault_at_any_moment(cluster: Any, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    fault, moment = list(FAULTS)[seed % len(FAULTS)], chance.uniform(0, 8)
    with cluster.spark.session() as spark:
        hit(spark, str(tmp_path), seed, fault, moment, lambda: FAULTS[fault](cluster.spark, chance))
