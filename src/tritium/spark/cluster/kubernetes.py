"""Kubernetes (driver)."""

from __future__ import annotations

from tritium.spark.cluster.asking import Asking
from tritium.spark.inside import pods
from tritium.spark.inside.pods import Pod
from tritium.spark.session import safely


class Kubernetes(Asking):
    """A Kubernetes cluster, where an executor is a pod, of one core by default."""

    default_cores = "1"
    overhead_factors = ("spark.executor.memoryOverheadFactor", "spark.kubernetes.memoryOverheadFactor")
    where_it_ended = (
        "Spark has ended {application}, and its log says why. Where a quota refused pods, or they failed again and "
        "again, free the quota, or raise spark.executor.maxNumFailures."
    )
    leaving_limit = ("spark.kubernetes.executor.terminationGracePeriodSeconds", "30s")
    why_lost = rf"{Asking.why_lost}|OOMKilled|The API gave the following (?:brief reason|message): (?!N/A|null)"
    replacement_seconds = 60.0  # Spark asks for another pod after 15 s, and a node may have to fetch its image.

    def pods(self) -> list[Pod]:
        """List the executors' pods; none where Spark or Kubernetes does not tell them."""
        if not pods.used(self.session.spark):
            return []
        return safely(lambda: pods.executor_pods(self.session), [])

    def waited_for(self) -> list[str]:
        """Return a sentence without its full stop on the pods that are pending, and one for each that is stuck."""
        listed = self.pods()
        alive = [pod for pod in listed if pod.phase in ("Pending", "Running")]
        running = sum(pod.phase == "Running" and not pod.stuck for pod in alive)
        texts = [pods.summary(alive, self.expected_executors())]
        if not listed or running >= self.expected_executors():
            texts = []
        return texts + [
            f"Pod {pod.name} was deleted and is still there, as its node {pod.node} does not answer; Spark counts it "
            f"as running, and asks for no other. `kubectl delete pod {pod.name} --namespace "
            f"{pods.namespace(self.session)} --force --grace-period=0` lets it"
            for pod in listed
            if pod.stuck
        ]
