"""What Kubernetes' API says of a pod, in the words of a note."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from tritium.spark.inside.pods import Pod, pod_of, summary

NOW = datetime.datetime(2026, 11, 22, 10, 0, 0, tzinfo=datetime.timezone.utc)
NO_ROOM = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/2 nodes are available: 2 Insufficient memory.\n no new claims to deallocate.",
}
NO_IMAGE = {"state": {"waiting": {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "mine:1"'}}}


def pod(name: str = "e-1", *, phase: str = "Pending", deleted: str | None = None, **status: Any) -> Pod:
    metadata: dict[str, Any] = {"name": name, "labels": {"spark-exec-id": name[-1]}}
    if deleted:
        metadata["deletionTimestamp"] = deleted
    return pod_of({"metadata": metadata, "spec": {"nodeName": "n1"}, "status": {"phase": phase, **status}}, NOW)


@pytest.mark.parametrize(
    ("status", "why"),
    [
        (
            {"conditions": [NO_ROOM]},
            "Unschedulable: 0/2 nodes are available: 2 Insufficient memory. no new claims to deallocate",
        ),
        ({"conditions": [{"type": "PodScheduled", "status": "True"}]}, ""),
        ({"containerStatuses": [NO_IMAGE]}, 'ImagePullBackOff: Back-off pulling image "mine:1"'),
        ({"containerStatuses": [{"state": {"waiting": {"reason": "ContainerCreating"}}}]}, "ContainerCreating"),
        ({"containerStatuses": [{"state": {}}], "conditions": None}, ""),
        ({}, ""),
    ],
)
def test_why_a_pod_is_pending(status: dict[str, Any], why: str) -> None:
    assert pod(**status).why == why
    assert pod(phase="Running", **status).why == ""


def test_a_deleted_pod_is_stuck_some_seconds_after_its_grace_period() -> None:
    assert not pod(phase="Running").stuck
    assert not pod(phase="Running", deleted="2026-11-22T10:00:20Z").stuck
    assert not pod(phase="Running", deleted="2026-11-22T09:59:57Z").stuck
    assert pod(phase="Running", deleted="2026-11-22T09:59:45Z").overdue == 15
    assert pod(phase="Running", deleted="2026-11-22T09:59:45Z").stuck


def test_pods_that_wait_for_the_same_are_listed_together() -> None:
    pods = [pod("e-1", phase="Running"), *(pod(f"e-{n}", conditions=[NO_ROOM]) for n in range(2, 7)), pod("e-7")]
    assert summary(pods, 9) == (
        "1 of 9 executor pods runs; e-2, e-3, e-4 and 2 more are pending (Unschedulable: 0/2 nodes are available: "
        "2 Insufficient memory. no new claims to deallocate); e-7 is pending; 2 do not exist: Spark has not asked yet, "
        "or a quota or an admission rule refuses them (the driver's log has its words)"
    )
