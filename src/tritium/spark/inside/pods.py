"""The pods of a session's executors, by Spark's own Kubernetes client (driver; not with Connect)."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tritium.spark.inside import Inside
from tritium.spark.session import Session

_CLIENT = "io.fabric8.kubernetes.client.KubernetesClient"
_LONGEST_REASON = 300
STUCK_SECONDS = 5.0
"""After so long beyond its grace period a deleted pod counts as stuck: its node does not answer."""


@dataclass(frozen=True)
class Pod:
    """An executor's pod.

    phase   : as Kubernetes has it: "Pending", "Running", and so on.
    why     : why it is pending, in Kubernetes' words; "" where that is not reported, or it is not pending.
    overdue : for how many seconds it should have been gone; 0 where it is not being deleted, or has time left.
    """

    name: str
    executor: str
    phase: str
    address: str
    node: str
    why: str
    overdue: float

    @property
    def stuck(self) -> bool:
        """Whether its node does not answer: it stays, and Spark counts it as running."""
        return self.overdue > STUCK_SECONDS


def probe(spark: Any) -> str | None:
    """Return why this session's pods can't be listed; None where they can."""
    executor_pods(Session.of(spark))
    return None


used = Inside("pods", probe)


def executor_pods(session: Session) -> list[Pod]:
    """List the pods of this application's executors."""
    selector = session.spark.sparkContext._jvm.java.util.HashMap()
    selector.put("spark-app-selector", session.spark.sparkContext.applicationId)
    selector.put("spark-role", "executor")
    listed = _client(session).pods().inNamespace(namespace(session)).withLabels(selector).list()
    serialize = session.spark.sparkContext._jvm.io.fabric8.kubernetes.client.utils.Serialization.asJson
    now = datetime.datetime.now(datetime.timezone.utc)
    return [pod_of(item, now) for item in json.loads(serialize(listed))["items"]]


def namespace(session: Session) -> str:
    """Return the namespace of the executors."""
    return session.setting("spark.kubernetes.namespace", "default")


def _client(session: Session) -> Any:
    """Return the Kubernetes client of Spark's scheduler backend, which has no public access to it."""
    backend = session.context.schedulerBackend()
    for field in backend.getClass().getDeclaredFields():
        if field.getType().getName() == _CLIENT:
            field.setAccessible(True)
            return field.get(backend)
    raise LookupError(f"{backend.getClass().getName()} has no {_CLIENT}")


def pod_of(item: dict[str, Any], now: datetime.datetime) -> Pod:
    """Return a pod of the API's JSON."""
    metadata, status, overdue = item["metadata"], item.get("status") or {}, 0.0
    if due := metadata.get("deletionTimestamp"):  # The end of its grace period.
        overdue = max(0.0, (now - datetime.datetime.fromisoformat(due.replace("Z", "+00:00"))).total_seconds())
    return Pod(
        name=metadata["name"],
        executor=metadata.get("labels", {}).get("spark-exec-id", ""),
        phase=status.get("phase", ""),
        address=status.get("podIP", ""),
        node=item.get("spec", {}).get("nodeName", ""),
        why=_why_pending(status)[:_LONGEST_REASON],
        overdue=overdue,
    )


def _why_pending(status: dict[str, Any]) -> str:
    if status.get("phase") != "Pending":
        return ""
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return _reason(condition)
    waiting = [(container.get("state") or {}).get("waiting") for container in status.get("containerStatuses") or ()]
    return next((_reason(state) for state in waiting if state), "")


def _reason(state: dict[str, Any]) -> str:
    return ": ".join(" ".join(state[key].split()) for key in ("reason", "message") if state.get(key)).rstrip(".")


def summary(pods: Iterable[Pod], asked_for: int) -> str:
    """Return in one clause what the executors' pods wait for: `1 of 3 executor pods runs; e-2, e-3 are pending (…)`."""
    pods = list(pods)
    running = sum(pod.phase == "Running" and not pod.stuck for pod in pods)
    parts = [f"{running} of {asked_for} executor pods {'runs' if running == 1 else 'run'}"]
    reasons: dict[str, list[str]] = {}
    for pod in pods:
        if pod.phase == "Pending":
            reasons.setdefault(pod.why, []).append(pod.name)
    for why, names in reasons.items():
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        state = f"{', '.join(names[:3])}{more} {'is' if len(names) == 1 else 'are'} pending"
        parts.append(f"{state} ({why})" if why else state)
    if (none := asked_for - len(pods)) > 0:
        parts.append(
            f"{none} {'does' if none == 1 else 'do'} not exist: Spark has not asked yet, or a quota or an admission "
            "rule refuses them (the driver's log has its words)"
        )
    return "; ".join(parts)
