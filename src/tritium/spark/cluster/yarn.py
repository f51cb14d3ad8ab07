"""Hadoop YARN (driver)."""

from __future__ import annotations

from tritium.spark.cluster.asking import Asking
from tritium.spark.session import Session


class Yarn(Asking):
    """A YARN cluster, where an executor is a container, of one core by default."""

    default_cores = "1"
    overhead_factors = ("spark.executor.memoryOverheadFactor",)
    replacement_seconds = 30.0  # A container is asked for, granted and started: 12 to 40 s were seen.
    why_lost = rf"{Asking.why_lost}|exceeding|memory limits|Diagnostics"
    where_it_ended = "YARN may have ended its application: `yarn application -status {application}` says why."

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._lost = False

    def waited_for(self) -> list[str]:
        """Return a sentence without its full stop on the executors that have not come; after a loss, one on its host.

        YARN tells nobody that a host is silent until it counts as lost.
        """
        registered, expected = self.executors(), self.expected_executors()
        if registered >= expected:
            return []
        queue = self.session.setting("spark.yarn.queue", "default")
        text = f"{registered} of {expected} executors run; YARN starts others when its queue {queue!r} has room: "
        texts = [f"{text}`yarn application -status {self.session.id}`"]
        self._lost = self._lost or registered < self.reservations().executors
        if self._lost:
            texts.append(
                "Executors of a host that does not answer are replaced only when YARN counts it as lost, after "
                "yarn.nm.liveness-monitor.expiry-interval-ms, 600000 by default, and up to a third more"
            )
        return texts
