"""A training in pods that is hit by a random fault at a random moment ends with every row counted once an epoch."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clusters import in_pods
from counted_training import hit

pytestmark = [pytest.mark.timeout(600), pytest.mark.parametrize("cluster", ["kubernetes-bare"], indirect=True)]

ROUNDS = int(os.environ.get("TRITIUM_FAULT_ROUNDS", "2"))
CUT_SECONDS = 25.0  # longer than the control connection waits, shorter than Spark does


def processes(kubernetes: Any, pod: dict[str, Any]) -> dict[str, list[int]]:
    """Return the processes of a pod by the name of their program."""
    found: dict[str, list[int]] = {}
    for pid in kubernetes.processes(pod):
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        found.setdefault(name, []).append(pid)
    return found


def kill(program: str) -> Callable[[Any, dict[str, Any], random.Random], None]:
    def fault(kubernetes: Any, pod: dict[str, Any], chance: random.Random) -> None:
        os.kill(chance.choice(processes(kubernetes, pod)[program]), signal.SIGKILL)

    return fault


def delete(seconds: int | None) -> Callable[[Any, dict[str, Any], random.Random], None]:
    return lambda kubernetes, pod, chance: kubernetes.delete(pod["metadata"]["name"], seconds)


def cut_off(kubernetes: Any, pod: dict[str, Any], chance: random.Random) -> None:
    node = pod["spec"]["nodeName"]
    kubernetes.link(node, "down")
    threading.Timer(CUT_SECONDS, lambda: kubernetes.link(node, "up")).start()


FAULTS: dict[str, Callable[[Any, dict[str, Any], random.Random], None]] = {
    "a Python process is killed": kill("python"),
    "the executor's JVM is killed": kill("java"),
    "the pod is deleted": delete(None),
    "the pod is deleted by force": delete(0),
    f"the node is cut off for {CUT_SECONDS:.0f} s": cut_off,
}


@pytest.fixture(scope="module")
def shared() -> Iterator[str]:
    """Yield a directory that the pods see, too."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        yield folder


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_a_fault_at_any_moment(cluster: Any, shared: str, seed: int) -> None:
    kubernetes, chance = cluster.spark, random.Random(seed)
    fault, moment = list(FAULTS)[seed % len(FAULTS)], chance.uniform(0, 8)
    volume = "spark.kubernetes.executor.volumes.hostPath.shared"
    conf = {f"{volume}.mount.path": shared, f"{volume}.options.path": shared, "spark.executor.memoryOverhead": "3g"}

    def strike() -> None:
        pod = chance.choice([pod for pod in kubernetes.pods() if pod["status"]["phase"] == "Running"])
        FAULTS[fault](kubernetes, pod, chance)

    with in_pods(kubernetes, **conf) as spark:
        hit(spark, f"{shared}/{seed}", seed, fault, moment, strike)
