"""Kubernetes (driver)."""

from __future__ import annotations

import time

from tritium.accelerators import Accelerators
from tritium.errors import NotEnoughSlots, StartTimeout
from tritium.spark.cluster.base import Cluster, Needs, Note, unheard
from tritium.spark.inside import pods
from tritium.spark.inside.pods import Pod
from tritium.spark.session import Session, safely

PODS_SECONDS = 5.0
"""The time between two questions to Kubernetes for the pods that are waited for."""


class Kubernetes(Cluster):
    """A Kubernetes cluster, where an executor is a pod, of one core by default."""

    default_cores = "1"
    leaving_limit = ("spark.kubernetes.executor.terminationGracePeriodSeconds", "30s")
    why_lost = rf"{Cluster.why_lost}|OOMKilled|The API gave the following (?:brief reason|message): (?!N/A|null)"
    replacement_seconds = 60.0  # Spark asks for another pod after 15 s, and a node may have to fetch its image.

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._asked = 0.0
        self._noted: set[str] = set()

    def expected_executors(self) -> int:
        return int(self.session.setting("spark.executor.instances", "2"))  # Spark's default on Kubernetes.

    def to_come(self, gang: Needs, note: Note) -> bool:
        """Tell whether Spark asks for enough pods, which may be pending for minutes; note why, and which are stuck.

        Each is noted once, as long as it stays the same.
        """
        if note is not unheard and time.monotonic() - self._asked > PODS_SECONDS:
            self._asked = time.monotonic()
            for text in self._what_is_waited_for():
                if text not in self._noted:
                    self._noted.add(text)
                    note(text)
        return self._coming(gang) >= gang.least

    def count_ranks(self, gang: Needs, note: Note, again: bool) -> int:
        try:
            return super().count_ranks(gang, note, again)
        except NotEnoughSlots as error:
            if self._coming(gang) < gang.least:
                raise
            registered = f"{self.executors()} of {self.expected_executors()} executors have registered"
            why = ". ".join(self._what_is_waited_for() or [registered])
            raise StartTimeout(
                f"{gang.least} ranks need {gang.least} slots at once, and {self.master!r} had {error.available} after "
                f"start_timeout={gang.start_timeout:g} s: {why}. Free room on the cluster, or raise start_timeout.",
                needed=gang.least,
                available=error.available,
            ) from None

    def pods(self) -> list[Pod]:
        """List the executors' pods; none where Spark or Kubernetes does not tell them."""
        if not pods.used(self.session.spark):
            return []
        return safely(lambda: pods.executor_pods(self.session), [])

    def _coming(self, gang: Needs) -> int:
        """Count the ranks that all the pods can run for which Spark asks."""
        ranks = self.cores_of_an_executor() // self.cores_of_a_rank(gang)
        if gang.gpus:
            ranks = min(ranks, Accelerators.of(gang).ranks_of(self.gpus_of_an_executor(gang)))
        return self.expected_executors() * ranks

    def _what_is_waited_for(self) -> list[str]:
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
