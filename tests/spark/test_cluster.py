"""A cluster's resources, counted by Spark itself, and the errors where they don't suffice."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from clusters import set_to, wait
from tritium.errors import BadSetting, NotEnoughSlots, StartTimeout, WrongVersion
from tritium.gang.settings import Gang
from tritium.spark.cluster import cluster_of
from tritium.spark.cluster.base import Cluster, check_versions
from tritium.spark.inside import SETTING
from tritium.spark.slots import RunSlots


def test_a_gang_that_fits_is_let_pass_on_every_kind(cluster: Any) -> None:
    found = cluster_of(cluster.spark)
    kinds = {"local": "Local", "connect": "ConnectLocal", "yarn": "Yarn", "kubernetes": "Kubernetes"}
    assert type(found).__name__ == kinds.get(cluster.kind, "Standalone")
    assert found.session.version == cluster.spark.version
    slots = None if cluster.kind == "connect" else 2
    wait(lambda: found.slots(Gang(ranks=2)) == slots, "its executors are there")
    assert found.profile(Gang(ranks=2)) is None
    found.ranks_for(Gang(ranks=2))


def test_too_few_slots_are_counted_before_anything_is_submitted(cluster: Any) -> None:
    found = cluster_of(cluster.spark)
    if found.session.connect:
        found.ranks_for(Gang(ranks=3))  # Connect has no count; start_timeout ends such a launch
        return
    with pytest.raises(NotEnoughSlots, match=r"3 ranks need 3 slots at once.* has 2\. Ask for ranks=2, or ") as error:
        found.ranks_for(Gang(ranks=3))
    assert (error.value.needed, error.value.available) == (3, 2)


def test_without_gpu_resources_gpus_are_refused(cluster: Any) -> None:
    with pytest.raises(NotEnoughSlots, match=r"spark\.executor\.resource\.gpu\.amount set, on workers whose"):
        cluster_of(cluster.spark).ranks_for(Gang(ranks=1, gpus=1))


@pytest.mark.parametrize("cluster", ["standalone"], indirect=True)
def test_cpus_make_a_profile_that_is_counted(cluster: Any) -> None:
    found = cluster_of(cluster.spark)  # two executors of one core each
    assert found.slots(Gang(cpus=1)) == 2
    with pytest.raises(NotEnoughSlots, match=r"cpus=2.* an executor .* has 1 \(spark\.executor\.cores\)"):
        found.ranks_for(Gang(cpus=2))


@pytest.mark.parametrize("cluster", ["standalone-gpus"], indirect=True)
def test_cores_of_a_rank_take_slots(cluster: Any) -> None:
    found = cluster_of(cluster.spark)  # two executors of two cores
    with pytest.raises(NotEnoughSlots, match=r"of 2 CPU core\(s\) each; .* has 2\. .*fewer than cpus=2 a rank"):
        found.ranks_for(Gang(ranks=3, cpus=2))


@pytest.mark.parametrize("cluster", ["standalone-gpus"], indirect=True)
class TestPretendedGpus:
    def test_gpus_are_counted(self, cluster: Any) -> None:
        found = cluster_of(cluster.spark)  # two executors of two GPUs and two cores; a task has one GPU by default
        assert found.profile(Gang(gpus=1)) is None
        assert found.slots(Gang(gpus=1)) == 4
        assert found.slots(Gang(gpus=2)) == 2
        with pytest.raises(NotEnoughSlots, match=r"of 1 CPU core\(s\) and 2 GPU\(s\) each"):
            found.ranks_for(Gang(ranks=3, gpus=2))
        with pytest.raises(NotEnoughSlots, match=r"an executor has 2 \(spark\.executor\.resource\.gpu\.amount=2\)"):
            found.ranks_for(Gang(gpus=3))

    def test_the_profile_gives_each_task_its_own(self, cluster: Any) -> None:
        profile = cluster_of(cluster.spark).profile(Gang(ranks=2, gpus=2))

        def addresses(batches: Any) -> Any:
            import pyarrow as pa
            from pyspark import TaskContext

            for _ in batches:
                continue
            yield pa.RecordBatch.from_pydict({"gpus": [",".join(TaskContext.get().resources()["gpu"].addresses)]})

        frame = cluster.spark.range(0, 2, 1, 2)
        rows = frame.mapInArrow(addresses, "gpus string", barrier=True, profile=profile).collect()
        assert [row.gpus for row in rows] == ["0,1", "0,1"]


@pytest.mark.parametrize("cluster", ["dynamic"], indirect=True)
def test_more_ranks_than_dynamic_allocation_allows_are_refused_by_name(cluster: Any) -> None:
    with pytest.raises(NotEnoughSlots, match=r"spark\.dynamicAllocation\.maxExecutors=2 there are never more than 2"):
        cluster_of(cluster.spark).ranks_for(Gang(ranks=3))
    assert cluster_of(cluster.spark).ranks_for(Gang(ranks=(1, 4))) == 2


def test_a_cluster_that_kills_idle_workers_is_refused(spark: Any) -> None:
    seconds, kill = (f"spark.sql.execution.pyspark.udf.{name}" for name in ("idleTimeoutSeconds", "killOnIdleTimeout"))
    spark.conf.set(seconds, "60")
    try:
        cluster_of(spark).ranks_for(Gang())  # Spark only logs then
        spark.conf.set(kill, "true")
        with pytest.raises(BadSetting, match=r"sent nothing for 60 s.*killOnIdleTimeout=false"):
            cluster_of(spark).ranks_for(Gang())
    finally:
        spark.conf.unset(seconds)
        spark.conf.unset(kill)


def test_where_slots_can_not_be_counted_start_timeout_ends_what_has_too_few(spark: Any) -> None:
    notes: list[str] = []
    with set_to(spark, **{SETTING: "-scheduler"}):
        uncounted = cluster_of(spark)
        assert uncounted.slots(Gang(ranks=3)) is None
        assert uncounted.ranks_for(Gang(ranks=3), notes.append) == 3
    assert notes == [f"slots are not counted ({SETTING}=-scheduler): start_timeout ends a gang that has too few"]


def test_what_is_no_session_is_said_so() -> None:
    with pytest.raises(BadSetting, match="is no SparkSession"):
        cluster_of("local[2]")


@pytest.mark.parametrize("spark_version", ["3.5.3", "3.5.0-SNAPSHOT"])
def test_an_old_spark_is_refused(spark_version: str) -> None:
    with pytest.raises(WrongVersion, match=rf"needs Spark 4\.0 or newer.*runs {spark_version}"):
        check_versions(spark_version, (3, 11))


def test_an_old_python_is_refused() -> None:
    with pytest.raises(WrongVersion, match=r"needs Python 3\.10 or newer; this is 3\.9"):
        check_versions("4.2.0", (3, 9))


@pytest.mark.parametrize("spark_version", ["4.1.0", "4.2.0", "4.10.0", "5.0.0-SNAPSHOT"])
def test_a_newer_spark_passes(spark_version: str) -> None:
    check_versions(spark_version, (3, 10))


@contextmanager
def slots(spark: Any, gang: Gang, timeout: float, note: Callable[[str], object] = str) -> Iterator[None]:
    """Hold a gang's slots for a block."""
    run = RunSlots()
    try:
        cluster_of(spark).take_slots(run, gang, gang.most, timeout, note)
        yield
    finally:
        run.release()


class TestTwoLaunchesAtOnce:
    def test_the_second_waits_visibly_for_its_turn(self, spark: Any) -> None:
        order: list[str] = []
        waiting, free = threading.Event(), threading.Event()

        def second() -> None:
            def note(text: str) -> None:
                order.append(text)
                waiting.set()

            with slots(spark, Gang(ranks=2), 20, note):
                order.append("second")

        def first() -> None:
            with slots(spark, Gang(ranks=1), 1, order.append):
                thread.start()
                assert waiting.wait(20)
                order.append("first")
            free.set()

        thread = threading.Thread(target=second)
        first()
        thread.join()
        assert free.is_set()
        assert order[1:] == ["first", "second"]
        assert order[0].startswith("waiting for slots: 2 needed, 2 in all, and other launches of this driver")

    def test_the_second_fails_by_start_timeout(self, spark: Any) -> None:
        with slots(spark, Gang(ranks=2), 1):
            begun = time.monotonic()
            with (
                pytest.raises(StartTimeout, match=r"2 ranks running.*start_timeout=0\.2 s"),
                slots(spark, Gang(ranks=1), 0.2),
            ):
                pass
            assert 0.2 <= time.monotonic() - begun < 20
        with slots(spark, Gang(ranks=2), 0.2):  # and everything was given back
            pass

    def test_slots_that_were_lost_are_held_by_nobody(self, spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """An executor may be killed between the count of the slots and their being held."""
        monkeypatch.setattr(Cluster, "slots", lambda self, gang: 1)
        with slots(spark, Gang(ranks=2), 0.2):
            pass

    def test_both_go_when_slots_suffice(self, spark: Any) -> None:
        notes: list[str] = []
        with slots(spark, Gang(ranks=1), 1, notes.append), slots(spark, Gang(), 1, notes.append):
            assert notes == []
