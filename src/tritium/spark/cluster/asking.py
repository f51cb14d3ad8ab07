"""Clusters whose manager starts the executors that Spark asks for when it has room (driver)."""

from __future__ import annotations

import time

from tritium.accelerators import Accelerators
from tritium.errors import NotEnoughSlots, StartTimeout
from tritium.spark.cluster.base import Cluster, Needs, Note, unheard
from tritium.spark.session import Session

ASK_SECONDS = 5.0
"""The time between two looks at what is waited for."""


class Asking(Cluster):
    """A cluster on which executors may be pending for minutes: a launch waits `start_timeout` for those asked for."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._asked = 0.0
        self._noted: set[str] = set()

    def waited_for(self) -> list[str]:
        """Return sentences without their full stop on the executors that have not come, and why."""
        return []

    def expected_executors(self) -> int:
        return int(self.session.setting("spark.executor.instances", "2"))  # Spark's default on YARN and Kubernetes.

    def to_come(self, gang: Needs, note: Note) -> bool:
        """Tell whether Spark asks for enough executors; note what is waited for, once as long as it stays the same."""
        if note is not unheard and time.monotonic() - self._asked > ASK_SECONDS:
            self._asked = time.monotonic()
            for text in self.waited_for():
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
            why = ". ".join(self.waited_for() or [registered])
            raise StartTimeout(
                f"{gang.least} ranks need {gang.least} slots at once, and {self.master!r} had {error.available} after "
                f"start_timeout={gang.start_timeout:g} s: {why}. Free room on the cluster, or raise start_timeout.",
                needed=gang.least,
                available=error.available,
            ) from None

    def _coming(self, gang: Needs) -> int:
        """Count the ranks that all the executors can run for which Spark asks."""
        ranks = self.cores_of_an_executor() // self.cores_of_a_rank(gang)
        if gang.gpus:
            ranks = min(ranks, Accelerators.of(gang).ranks_of(self.gpus_of_an_executor(gang)))
        return self.expected_executors() * ranks
