"""Which class a session's cluster has, and where the kinds differ."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import tritium.spark.cluster
from tritium.errors import BadSetting, NotEnoughSlots
from tritium.gang.driver.on_cluster import jvm_errors
from tritium.gang.settings import Gang
from tritium.spark.cluster import cluster_of
from tritium.spark.cluster.dynamic import Dynamic
from tritium.spark.session import Session


class Spark:
    """The part of a SparkSession by which the kind of its cluster is known."""

    range = None
    version = "4.2.0"

    def __init__(self, **settings: str) -> None:
        settings = {name.replace("_", "."): value for name, value in settings.items()}
        self.conf = SimpleNamespace(get=lambda name, default=None: settings.get(name, default))
        self.sparkContext = SimpleNamespace(_jsc=object(), applicationId=str(id(self)), pythonExec="python3")


class Client(Spark):
    __module__ = "pyspark.sql.connect.session"


@pytest.fixture(autouse=True)
def _counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tritium.spark.cluster.scheduler, "used", lambda spark: True)


@pytest.mark.parametrize(
    ("master", "kind"),
    [
        ("local", "Local"),
        ("local[2]", "Local"),
        ("local-cluster[2,1,1024]", "Standalone"),
        ("spark://host:7077", "Standalone"),
        ("yarn", "Yarn"),
        ("k8s://https://host:6443", "Kubernetes"),
        ("another://host", "Standalone"),
    ],
)
def test_the_manager_is_known_by_the_master_and_stands_behind_connect_and_dynamic_allocation(
    master: str, kind: str
) -> None:
    assert type(cluster_of(Spark(spark_master=master))).__name__ == kind
    assert type(cluster_of(Client(spark_master=master))).__name__ == f"Connect{kind}"
    dynamic = cluster_of(Spark(spark_master=master, spark_dynamicAllocation_enabled="TRUE"))
    assert type(dynamic).__name__ == (kind if kind == "Local" else f"Dynamic{kind}")
    assert dynamic.starts_one_by_one == (kind != "Local")


def test_slots_that_can_not_be_counted_are_not_under_dynamic_allocation_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tritium.spark.cluster.scheduler, "used", lambda spark: False)
    cluster = cluster_of(Spark(spark_master="yarn", spark_dynamicAllocation_enabled="true"))
    assert (type(cluster).__name__, cluster.starts_one_by_one) == ("DynamicUncountedYarn", True)
    assert (cluster.slots(Gang()), cluster.draws_bar, cluster.executor_hosts()) == (None, False, [])
    assert type(cluster_of(Spark(spark_master="yarn"))).__name__ == "UncountedYarn"


def test_dynamic_allocation_is_refused_over_connect_but_for_a_local_server() -> None:
    for master in ("yarn", "spark://host:7077"):
        with pytest.raises(BadSetting, match="dynamicAllocation"):
            cluster_of(Client(spark_master=master, spark_dynamicAllocation_enabled="true")).ranks_for(Gang(ranks=2))
    local = cluster_of(Client(spark_master="local[2]", spark_dynamicAllocation_enabled="true"))
    assert local.ranks_for(Gang(ranks=2)) == 2


@pytest.mark.parametrize("master", ["yarn", "k8s://https://host:6443"])
def test_an_executor_of_a_resource_manager_has_one_core_by_default(master: str) -> None:
    with pytest.raises(NotEnoughSlots, match="has 1 \\(spark"):
        cluster_of(Spark(spark_master=master)).check_cores(Gang(cpus=2))
    cluster_of(Spark(spark_master=master, spark_executor_cores="2")).check_cores(Gang(cpus=2))
    cluster_of(Spark(spark_master="spark://host:7077")).check_cores(Gang(cpus=2))
    cluster_of(Spark(spark_master="local[1]")).check_cores(Gang(cpus=2))


def test_a_session_that_was_stopped_is_said_to_be() -> None:
    stopped: Any = Spark(spark_master="local")
    stopped.sparkContext._jsc = None
    with pytest.raises(BadSetting, match="has been stopped"):
        cluster_of(stopped)
    with pytest.raises(BadSetting, match="has been stopped"), jvm_errors(stopped):  # It was after `submit`.
        stopped.sparkContext._jsc.sc()


@pytest.mark.parametrize(
    ("settings", "gang", "most"),
    [
        ({}, Gang(ranks=(1, 8)), 8),  # standalone: an executor has all cores of its worker
        ({"spark.executor.cores": "4"}, Gang(ranks=(1, 16)), 8),
        ({"spark.executor.cores": "4"}, Gang(ranks=(1, 16), cpus=2), 4),
        ({"spark.executor.cores": "8", "spark.executor.resource.gpu.amount": "1"}, Gang(ranks=(1, 8), gpus=1), 2),
        ({"spark.executor.resource.gpu.amount": "4"}, Gang(ranks=(1, 8), gpus=2), 4),
    ],
)
def test_ranks_under_dynamic_allocation_are_as_many_as_there_can_be_slots(
    settings: dict[str, str], gang: Gang, most: int
) -> None:
    settings = {"spark.dynamicAllocation.maxExecutors": "2"} | settings
    conf = SimpleNamespace(get=lambda name, default: settings.get(name, default))
    cluster = Dynamic(Session(SimpleNamespace(conf=conf)))
    assert cluster.count_ranks(gang, lambda _: None, again=False) == most
