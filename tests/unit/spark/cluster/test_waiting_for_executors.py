"""A launch in a young application waits for executors, and counts the last one at whatever moment it registers."""

from __future__ import annotations

import time
import uuid
from types import SimpleNamespace

import pytest

from tritium.errors import BadSetting, NotEnoughSlots, RunCancelled, StartTimeout
from tritium.gang.driver.cancellation import Cancellation
from tritium.gang.settings import Gang
from tritium.spark.cluster import base
from tritium.spark.cluster.kubernetes import Kubernetes
from tritium.spark.cluster.standalone import Standalone
from tritium.spark.cluster.yarn import Yarn
from tritium.spark.inside.pods import Pod
from tritium.spark.session import Session


def session(age: float = 0.0, **settings: str) -> Session:
    """Return a session that began so many seconds ago, whose Spark waits 20 s for executors to register."""
    settings = {name.replace("_", "."): value for name, value in settings.items()}
    application = SimpleNamespace(getTimeAsSeconds=lambda _, __: 20)
    jvm = SimpleNamespace(sc=lambda: SimpleNamespace(conf=lambda: application))
    started = SimpleNamespace(applicationId=f"young-{uuid.uuid4()}", _jsc=jvm, startTime=(time.time() - age) * 1000)
    conf = SimpleNamespace(get=lambda name, default: settings.get(name, default))
    return Session(SimpleNamespace(sparkContext=started, conf=conf))


class Young(Standalone):
    """Two executors, of which the second registers right after the given number of questions to the scheduler."""

    def __init__(self, questions: int) -> None:
        super().__init__(session(spark_master="local-cluster[2,1,1024]"))
        self.questions_left = questions

    def _answer(self) -> int:
        self.questions_left -= 1
        return 1 if self.questions_left >= 0 else 2

    def slots(self, gang: Gang) -> int:
        return self._answer()

    def executors(self) -> int:
        return self._answer()


@pytest.mark.parametrize("questions", range(12))
def test_an_executor_that_registers_between_two_questions_counts(
    questions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "_POLL_SECONDS", 0.0)
    notes: list[str] = []
    assert Young(questions).await_slots(Gang(ranks=2), notes.append, again=False) == 2


def test_a_run_that_is_cancelled_waits_no_longer() -> None:
    cluster, cancellation = Young(10**9), Cancellation()
    cluster.sleep = cancellation.pause
    with pytest.raises(RunCancelled):
        cluster.await_slots(Gang(ranks=2), lambda _: cancellation.request(), again=False)


class InPods(Kubernetes):
    """As many executors as `registered` says, of 2 that Spark asks for; the application is long beyond its youth."""

    def __init__(self, registered: int, **settings: str) -> None:
        super().__init__(session(1000, spark_master="k8s://https://a:6443", **settings))
        self.registered = registered
        self.sleeps = 0
        self.sleep = self._count_sleep

    def _count_sleep(self, seconds: float) -> None:
        self.sleeps += 1
        time.sleep(seconds)

    def slots(self, gang: Gang) -> int:
        return self.registered

    def executors(self) -> int:
        return self.registered

    def pods(self) -> list[Pod]:
        why = "Unschedulable: 0/2 nodes are available: 2 Insufficient cpu"
        lost = Pod("e-2", "2", "Running", "10.0.0.2", "n2", "", 20.0)
        return [Pod("e-1", "1", "Running", "10.0.0.1", "n1", "", 0), Pod("e-3", "3", "Pending", "", "", why, 0), lost]


def test_pods_that_spark_has_asked_for_are_waited_for_and_the_error_says_what_they_wait_for() -> None:
    notes: list[str] = []
    cluster = InPods(1)
    with pytest.raises(StartTimeout) as caught:
        cluster.count_ranks(Gang(ranks=2, start_timeout=0.3), notes.append, again=False)
    stuck = (
        "Pod e-2 was deleted and is still there, as its node n2 does not answer; Spark counts it as running, and asks "
        "for no other. `kubectl delete pod e-2 --namespace default --force --grace-period=0` lets it"
    )
    pending = "1 of 2 executor pods runs; e-3 is pending (Unschedulable: 0/2 nodes are available: 2 Insufficient cpu)"
    assert str(caught.value) == (
        "2 ranks need 2 slots at once, and 'k8s://https://a:6443' had 1 after start_timeout=0.3 s: "
        f"{pending}. {stuck}. Free room on the cluster, or raise start_timeout."
    )
    assert notes == ["waiting for executors: 1 of 2 slots so far, at most 0 s", pending, stuck]
    assert (caught.value.needed, caught.value.available) == (2, 1)


def test_more_ranks_than_pods_could_run_are_refused_at_once() -> None:
    cluster = InPods(1, spark_executor_cores="2", spark_task_cpus="2")
    with pytest.raises(NotEnoughSlots, match="3 ranks need 3 slots"):
        cluster.count_ranks(Gang(ranks=3), str, again=False)
    assert cluster.sleeps == 0


def test_a_gang_that_may_be_smaller_does_not_wait_for_pending_pods() -> None:
    cluster = InPods(1)
    assert cluster.count_ranks(Gang(ranks=(1, 2)), str, again=False) == 1
    assert cluster.sleeps == 0


class OnYarn(Yarn):
    """One executor of two, where there were two before; the application is long beyond its youth."""

    def __init__(self) -> None:
        super().__init__(session(1000, spark_master="yarn", spark_yarn_queue="gangs"))

    def slots(self, gang: Gang) -> int:
        return 1

    def executors(self) -> int:
        return 1


@pytest.mark.parametrize("lost", [False, True])
def test_executors_that_yarn_was_asked_for_are_waited_for_and_the_error_says_what_they_wait_for(lost: bool) -> None:
    cluster = OnYarn()
    cluster.reservations().executors = 2 if lost else 0
    with pytest.raises(StartTimeout, match=r"had 1 after start_timeout=0\.3 s: 1 of 2 executors run; YARN") as caught:
        cluster.count_ranks(Gang(ranks=2, start_timeout=0.3, replacement_timeout=0.1), str, again=lost)
    assert "its queue 'gangs' has room" in str(caught.value)
    assert ("yarn.nm.liveness-monitor.expiry-interval-ms" in str(caught.value)) == lost
    with pytest.raises(NotEnoughSlots, match="3 ranks need 3 slots"):
        cluster.count_ranks(Gang(ranks=3, replacement_timeout=0.1), str, again=False)


def test_a_session_that_yarn_ends_meanwhile_is_waited_for_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "is_stopped", property(lambda _: True))
    with pytest.raises(BadSetting, match=r"has been stopped\. YARN .*`yarn application -status young-\S+` says why"):
        OnYarn().count_ranks(Gang(ranks=2, start_timeout=60), str, again=True)


@pytest.mark.parametrize(("kind", "seconds"), [(Standalone, 15), (Kubernetes, 60), (Yarn, 30)])
def test_replacements_are_waited_for_as_long_as_the_setting_says_or_the_kind_of_cluster(
    kind: type[base.Cluster], seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lost(Exception):
        """Ends the wait."""

    def end(_: float) -> None:
        raise Lost

    cluster = kind(session(1000))
    monkeypatch.setattr(cluster, "slots", lambda gang: 1)
    monkeypatch.setattr(cluster, "executors", lambda: 1)
    cluster.sleep = end
    for gang, wanted in ((Gang(ranks=(1, 2)), seconds), (Gang(ranks=(1, 2), replacement_timeout=7), 7)):
        notes: list[str] = []
        with pytest.raises(Lost):
            cluster.await_slots(gang, notes.append, again=True)
        assert notes[0] == f"waiting for executors: 1 of 2 slots so far, at most {wanted} s"
