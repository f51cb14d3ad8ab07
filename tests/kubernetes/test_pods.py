"""Pods that are pending, killed for memory, and on a node that is cut off, on a real Kubernetes of two nodes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tritium as tr
from clusters import COMMON, SMALL, in_pods, wait
from kubernetes_cluster import NODE_BYTES
from kubernetes_image import SPARK
from tritium.errors import NotEnoughSlots, RankFailed, StartTimeout

pytestmark = [pytest.mark.timeout(400), pytest.mark.parametrize("cluster", ["kubernetes-bare"], indirect=True)]

QUIET: dict[str, Any] = {"progress": False, "output": "none"}
ONE_A_NODE = {"spark.executor.memoryOverhead": "3g"}


@pytest.fixture
def kubernetes(cluster: Any) -> Iterator[Any]:
    """Return the running Kubernetes, whose nodes take pods again after the test."""
    kubernetes = cluster.spark
    yield kubernetes
    for node in ("n1", "n2"):
        kubernetes.link(node, "up")
        close(kubernetes, node, False)


def close(kubernetes: Any, node: str, closed: bool) -> None:
    """Let a node take no further pods, or take some again."""
    change = {"spec": {"unschedulable": closed}}
    kubernetes.call("PATCH", f"/api/v1/nodes/{node}", change, "application/merge-patch+json")


def noted(run: tr.Run, text: str) -> str:
    """Wait for a note of the run that holds this text, and return it."""
    return next(event.text for event in run.events() if text in getattr(event, "text", ""))


def test_pods_that_are_pending_are_waited_for_and_the_launch_says_why_they_are(kubernetes: Any) -> None:
    close(kubernetes, "n2", True)
    with in_pods(kubernetes, 1, **ONE_A_NODE, **{"spark.scheduler.maxRegisteredResourcesWaitingTime": "1s"}) as spark:
        why = r"1 of 2 executor pods runs; \S+-exec-\d is pending \(Unschedulable: 0/2 nodes are available: .*unschedul"
        with pytest.raises(StartTimeout, match=rf"'k8s.* had 1 after start_timeout=2 s: {why}"):
            tr.launch(os.getpid, ranks=2, spark=spark, start_timeout=2, **QUIET)
        assert len(tr.launch(os.getpid, ranks=(1, 2), spark=spark, **QUIET)) == 1
        with tr.submit(lambda: tr.world().rank, ranks=2, spark=spark, start_timeout=200, **QUIET) as run:
            assert "Unschedulable" in noted(run, "is pending")
            close(kubernetes, "n2", False)
            assert run.result(200) == [0, 1]


QUOTAS = "/api/v1/namespaces/default/resourcequotas"
LAUNCH = """
import json, sys
from pyspark.sql import SparkSession
import tritium as tr
from tritium.errors import JobFailed

builder = SparkSession.builder.master(sys.argv[1])
for key, value in json.loads(sys.argv[2]).items():
    builder = builder.config(key, value)
spark = builder.getOrCreate()
try:
    tr.launch(int, ranks=2, spark=spark, progress=False)
except JobFailed as error:
    print(error)
"""


@pytest.fixture
def one_pod(kubernetes: Any) -> Iterator[None]:
    """Let a quota allow one pod, until the test has deleted it or has ended."""
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "one"}, "spec": {"hard": {"pods": "1"}}}
    kubernetes.call("POST", QUOTAS, quota)
    wait(lambda: "hard" in kubernetes.call("GET", f"{QUOTAS}/one").get("status", {}), "the quota counts")
    yield
    with contextlib.suppress(urllib.error.HTTPError):
        kubernetes.call("DELETE", f"{QUOTAS}/one")


YOUNG = {"spark.scheduler.maxRegisteredResourcesWaitingTime": "1s"}


def test_pods_that_a_quota_refuses_are_waited_for_as_long_as_spark_does(kubernetes: Any, one_pod: None) -> None:
    settings: dict[str, Any] = {"ranks": 2, "start_timeout": 200, **QUIET}
    with (
        in_pods(kubernetes, 1, **YOUNG, **{"spark.executor.maxNumFailures": "1000"}) as spark,
        tr.submit(lambda: tr.world().rank, spark=spark, **settings) as run,
    ):
        assert "1 of 2 executor pods runs; 1 does not exist: " in noted(run, "a quota or an admission rule")
        kubernetes.call("DELETE", f"{QUOTAS}/one")
        assert run.result(200) == [0, 1]


def test_a_driver_that_spark_ends_because_of_a_quota_says_so(kubernetes: Any, one_pod: None, tmp_path: Path) -> None:
    conf = {**COMMON, **SMALL, **kubernetes.client_conf(), **YOUNG, "spark.executor.maxNumFailures": "12"}
    command = [sys.executable, "-c", LAUNCH, f"k8s://{kubernetes.url}", json.dumps(conf)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    # What is seen first: that the session is stopped, which takes seconds as pods are deleted, or that the JVM exits.
    told = f"{done.stdout}{done.stderr}"
    stopped, exited = (
        "This SparkSession has been stopped",
        "has ended with exit code 11, as more executors failed or, on",
    )
    assert stopped in told or exited in told, told[-2000:]
    assert "raise spark.executor.maxNumFailures" in told


def test_a_rank_or_a_pod_that_is_killed_for_memory_says_so_in_the_first_line(kubernetes: Any) -> None:
    def take_at_once() -> None:
        taken = []
        while tr.world().rank == 1:
            taken.append(b"x" * (64 << 20))
        time.sleep(600)

    def take() -> None:
        for process in Path("/proc").glob("[0-9]*/comm"):
            if process.read_text() == "java\n":  # Which the kernel prefers then to many small processes.
                process.with_name("oom_score_adj").write_text("1000")
        while tr.world().rank == 1:
            subprocess.Popen([sys.executable, "-c", "taken = b'x' * (64 << 20); import time; time.sleep(600)"])
            time.sleep(0.1)
        time.sleep(600)

    with in_pods(kubernetes, **{"spark.executor.memoryOverhead": "900m"}) as spark:
        # Under load the kernel was seen to kill Java 70 ms after the rank, whose memory was not free yet.
        with pytest.raises(RankFailed, match=r"\A.*(its cgroup's limit of 1\.4 GB was reached: oom_kill 1|OOMKilled)"):
            tr.launch(take_at_once, ranks=2, spark=spark, retries=0, **QUIET)
        with pytest.raises(RankFailed) as caught:
            tr.launch(take, ranks=2, spark=spark, retries=0, **QUIET)
        first = str(caught.value).partition("\n")[0]
        assert "exit code 137" in first
        assert "OOMKilled" in first


def test_a_node_that_is_cut_off_is_given_up_and_its_pod_is_named(kubernetes: Any) -> None:
    def train() -> tuple[int, str]:
        world = tr.world()
        for _ in range(100):
            world.barrier()
            time.sleep(0.05)
            world.log(alive=1)
        return world.size, os.uname().nodename

    with in_pods(kubernetes, **ONE_A_NODE) as spark:
        elastic = {"ranks": (1, 2), "retries": 1, "replacement_timeout": 3}
        with tr.submit(train, spark=spark, **elastic, **QUIET) as run:
            wait(lambda: run.status == "running", "the gang has formed")
            time.sleep(1)
            lost = kubernetes.pods()[-1]
            kubernetes.link(lost["spec"]["nodeName"], "down")
            ((size, host),) = run.result(200)
            assert "which does not answer: it is asked for another one" in noted(run, "Spark still counted executor")
        name = lost["metadata"]["name"]
        assert (size, host != name) == (1, True)
        with tr.submit(train, spark=spark, ranks=2, retries=0, **QUIET) as run:
            command = noted(run, "kubectl delete pod").partition("`")[2].partition("`")[0]
            assert command == f"kubectl delete pod {name} --namespace default --force --grace-period=0"
            kubernetes.delete(name, seconds=0)
            kubernetes.link(lost["spec"]["nodeName"], "up")
            assert [size for size, _ in run.result(200)] == [2, 2]


CLASSES = "/apis/scheduling.k8s.io/v1/priorityclasses"
PODS = "/api/v1/namespaces/default/pods"


@pytest.fixture
def urgent(kubernetes: Any) -> Iterator[dict[str, Any]]:
    """Return a pod that needs most of a node, of a PriorityClass above that of executors."""
    priority = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": "urgent"}}
    kubernetes.call("POST", CLASSES, {**priority, "value": 1000, "globalDefault": False})
    memory = {"requests": {"memory": f"{(NODE_BYTES >> 20) - 1024}Mi"}}
    container = {"name": "urgent", "image": SPARK, "imagePullPolicy": "Never", "resources": memory}
    container["command"] = ["sleep", "600"]
    spec = {"priorityClassName": "urgent", "containers": [container], "terminationGracePeriodSeconds": 0}
    yield {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "urgent"}, "spec": spec}
    with contextlib.suppress(urllib.error.HTTPError):
        kubernetes.call("DELETE", f"{PODS}/urgent")
    kubernetes.call("DELETE", f"{CLASSES}/urgent")


@pytest.mark.parametrize("by", ["kubectl delete", "a PriorityClass"])
def test_a_pod_that_goes_with_notice_costs_neither_a_step_nor_a_retry(
    kubernetes: Any, urgent: dict[str, Any], by: str
) -> None:
    def train() -> int:
        world = tr.world()
        saved = world.checkpoint.load()
        start = 0 if saved is None else saved.step
        for step in range(start + 1, 121):
            world.barrier()
            time.sleep(0.1)
            world.checkpoint.save({"step": step}, step, every=1000)
        return start

    volume = "spark.kubernetes.executor.volumes.hostPath.shared"
    with tempfile.TemporaryDirectory(dir="/var/tmp") as shared:
        conf = {f"{volume}.mount.path": shared, f"{volume}.options.path": shared, "spark.decommission.enabled": "true"}
        settings: dict[str, Any] = {"ranks": 2, "retries": 0, "run_dir": f"{shared}/run", **QUIET}
        with in_pods(kubernetes, **conf) as spark, tr.submit(train, spark=spark, **settings) as run:
            wait(lambda: run.status == "running", "the gang has formed")
            time.sleep(2)
            if by == "a PriorityClass":
                kubernetes.call("POST", PODS, urgent)
            else:
                kubernetes.delete(kubernetes.pods()[-1]["metadata"]["name"])
            assert noted(run, "Spark decommissions executor")
            first, second = run.result(200)
    assert first == second > 5


def test_gpus_of_pods_go_to_the_ranks_of_a_session_whose_tasks_have_none(kubernetes: Any) -> None:
    def train() -> tuple[str, str, str]:  # As under torchrun, ranks of a host see each other's, and take one.
        return os.uname().nodename, os.environ["CUDA_VISIBLE_DEVICES"], tr.world().device

    def set_gpus(node: str, count: str | None) -> None:
        change = {"status": {"capacity": {"nvidia.com/gpu": count}, "allocatable": {"nvidia.com/gpu": count}}}
        kubernetes.call("PATCH", f"/api/v1/nodes/{node}/status", change, "application/merge-patch+json")

    volume, gpu = "spark.kubernetes.executor.volumes.hostPath.shared", "spark.executor.resource.gpu"
    with tempfile.TemporaryDirectory(dir="/var/tmp") as shared:
        script = Path(shared, "gpus.sh")
        script.write_text("""#!/bin/sh\necho '{"name": "gpu", "addresses": ["0", "1"]}'\n""")
        script.chmod(0o755)
        conf = {f"{volume}.mount.path": shared, f"{volume}.options.path": shared, "spark.executor.cores": "2"}
        conf |= {f"{gpu}.amount": "2", f"{gpu}.vendor": "nvidia.com", f"{gpu}.discoveryScript": str(script)}
        for node in ("n1", "n2"):
            set_gpus(node, "2")
        try:
            with in_pods(kubernetes, **conf) as spark:
                limits = [pod["spec"]["containers"][0]["resources"]["limits"] for pod in kubernetes.pods()]
                assert [limit["nvidia.com/gpu"] for limit in limits] == ["2", "2"]
                ranks = tr.launch(train, ranks=4, gpus=1, spark=spark, retries=0, **QUIET)
                assert sorted(rank[1:] for rank in ranks) == sorted([("0,1", "cuda:0"), ("0,1", "cuda:1")] * 2)
                assert len(set(ranks)) == 4
                wide = tr.launch(train, ranks=2, gpus=2, spark=spark, **QUIET)
                assert [rank[1:] for rank in wide] == [("0,1", "cuda:0")] * 2
                with pytest.raises(NotEnoughSlots, match="5 ranks need 5 slots"):
                    tr.launch(train, ranks=5, gpus=1, spark=spark, **QUIET)
        finally:
            for node in ("n1", "n2"):
                set_gpus(node, None)
