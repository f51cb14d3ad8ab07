"""examples/kubernetes: what Kubernetes knows is what it takes, and cluster mode and the gang run as the files say."""

from __future__ import annotations

import contextlib
import os
import subprocess
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import kubernetes_image
import tritium as tr
from clusters import in_pods, spark_script, wait

pytestmark = [pytest.mark.timeout(400), pytest.mark.parametrize("cluster", ["kubernetes-bare"], indirect=True)]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "kubernetes"
PLACES = {
    "ServiceAccount": "/api/v1/namespaces/default/serviceaccounts",
    "Pod": "/api/v1/namespaces/default/pods",
    "Role": "/apis/rbac.authorization.k8s.io/v1/namespaces/default/roles",
    "RoleBinding": "/apis/rbac.authorization.k8s.io/v1/namespaces/default/rolebindings",
    "Workload": "/apis/scheduling.k8s.io/v1alpha1/namespaces/default/workloads",
}
OF_OTHERS = ("sparkoperator.k8s.io", "kueue.x-k8s.io")  # Their definitions are not Kubernetes' own.


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((EXAMPLES / name).read_text()))


@contextlib.contextmanager
def applied(kubernetes: Any, name: str) -> Iterator[None]:
    """Create what a file describes, for a block."""
    with contextlib.ExitStack() as stack:
        for document in documents(name):
            place = PLACES[document["kind"]]
            kubernetes.call("POST", f"{place}?fieldValidation=Strict", document)
            stack.callback(kubernetes.call, "DELETE", f"{place}/{document['metadata']['name']}")
        yield


def test_kubernetes_takes_its_own_kinds_without_an_unknown_field(cluster: Any) -> None:
    checked = []
    for path in sorted(EXAMPLES.glob("*.yaml")):
        for document in documents(path.name):
            if document["apiVersion"].startswith(OF_OTHERS):
                continue
            if document["kind"] == "Pod":  # Spark completes the template.
                document["metadata"] = {"name": "executor"}
                document["spec"]["containers"][0]["image"] = kubernetes_image.SPARK
            place = PLACES[document["kind"]]
            cluster.spark.call("POST", f"{place}?dryRun=All&fieldValidation=Strict", document)
            checked.append(document["kind"])
    assert checked == ["Pod", "Workload", "ServiceAccount", "Role", "RoleBinding"]
    wrong = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "a"}, "automount": True}
    with pytest.raises(urllib.error.HTTPError, match="400"):
        cluster.spark.call("POST", f"{PLACES['ServiceAccount']}?dryRun=All&fieldValidation=Strict", wrong)


def test_the_files_agree_on_names_and_numbers(cluster: Any) -> None:
    (application,), (_, _, queue), (account, _, binding) = map(
        documents, ("spark-application.yaml", "kueue.yaml", "rbac.yaml")
    )
    submit, dockerfile = (EXAMPLES / "submit.sh").read_text(), (EXAMPLES / "Dockerfile").read_text()
    spec, account_name = application["spec"], account["metadata"]["name"]
    assert application["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == queue["metadata"]["name"]
    assert spec["driver"]["serviceAccount"] == binding["subjects"][0]["name"] == account_name
    assert f"serviceAccountName={account_name} " in submit
    assert spec["mainApplicationFile"] in submit
    assert f"COPY train.py {spec['mainApplicationFile'].removeprefix('local://')}" in dockerfile
    assert f"spark:{spec['sparkVersion']}" in dockerfile
    for key, setting in {"instances": "instances", "memory": "memory", "memoryOverhead": "memoryOverhead"}.items():
        assert f"spark.executor.{setting}={spec['executor'][key]} " in submit
    assert len(dockerfile.splitlines()) <= 25


def test_cluster_mode_runs_with_the_role_of_the_example(cluster: Any, tmp_path: Path) -> None:
    kubernetes = cluster.spark
    account = "spark.kubernetes.authenticate.submission"
    conf = {
        f"{account}.caCertFile": str(kubernetes.certificate),
        f"{account}.oauthToken": kubernetes.token,
        "spark.kubernetes.container.image.pullPolicy": "Never",
        "spark.kubernetes.driver.master": kubernetes.url,  # Neither DNS nor services are there.
        "spark.kubernetes.executor.useDriverPodIP": "true",
        "spark.kubernetes.driver.request.cores": "0.5",
        "spark.kubernetes.executor.request.cores": "0.5",
        "spark.log.level": "WARN",
    }
    for role, variables in (("driver", "spark.kubernetes.driverEnv"), ("executor", "spark.executorEnv")):
        volume = f"spark.kubernetes.{role}.volumes.hostPath.example"
        conf |= {**kubernetes_image.mounts(role), f"{variables}.PYSPARK_PYTHON": os.environ["PYSPARK_PYTHON"]}
        conf |= {f"{volume}.mount.path": "/opt/train", f"{volume}.options.path": str(EXAMPLES)}
    options = [word for key, value in conf.items() for word in ("--conf", f"{key}={value}")]
    path = f"{Path(spark_script('spark-submit')).parent}:{os.environ['PATH']}"
    with applied(kubernetes, "rbac.yaml"):
        command = ["sh", str(EXAMPLES / "submit.sh"), kubernetes.url, kubernetes_image.SPARK, *options]
        done = subprocess.run(
            command, env={**os.environ, "PATH": path}, cwd=tmp_path, capture_output=True, text=True, timeout=350
        )
        (driver,) = kubernetes.pods("driver")
        place = f"{PLACES['Pod']}/{driver['metadata']['name']}"
        log = kubernetes.call("GET", f"{place}/log")
        kubernetes.call("DELETE", place)
    assert done.returncode == 0, done.stderr[-3000:]
    assert driver["status"]["phase"] == "Succeeded", log
    assert log.count("y = 2.0 x + 3.0") == 2, log
    assert "orbidden" not in log


def test_a_gang_of_kubernetes_own_waits_as_a_whole(cluster: Any) -> None:
    kubernetes = cluster.spark
    node, merge = "/api/v1/nodes/n2", "application/merge-patch+json"
    conf = {
        "spark.executor.memoryOverhead": "3g",  # A node has room for one.
        "spark.kubernetes.executor.podTemplateFile": str(EXAMPLES / "gang-executor.yaml"),
        "spark.scheduler.maxRegisteredResourcesWaitingTime": "1s",
    }
    kubernetes.call("PATCH", node, {"spec": {"unschedulable": True}}, merge)
    try:
        with applied(kubernetes, "gang.yaml"), in_pods(kubernetes, 0, **conf) as spark:
            wait(lambda: len(kubernetes.pods()) == 2, "Spark has asked for both")
            settings: dict[str, Any] = {"ranks": 2, "progress": False, "output": "none", "start_timeout": 200}
            with tr.submit(os.uname, spark=spark, **settings) as run:
                said = next(event.text for event in run.events() if "Unschedulable" in getattr(event, "text", ""))
                assert "0 of 2 executor pods run; " in said
                assert [pod["status"]["phase"] for pod in kubernetes.pods()] == ["Pending", "Pending"]
                kubernetes.call("PATCH", node, {"spec": {"unschedulable": False}}, merge)
                assert len(run.result(200)) == 2
    finally:
        kubernetes.call("PATCH", node, {"spec": {"unschedulable": False}}, merge)
