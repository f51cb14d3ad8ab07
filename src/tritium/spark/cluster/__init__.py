"""The kinds of clusters, one class each, and which of them a session has (driver)."""

from __future__ import annotations

import functools
from typing import Any, cast

from tritium.errors import BadSetting
from tritium.spark.cluster.base import Cluster
from tritium.spark.cluster.connect import Connect, Uncounted
from tritium.spark.cluster.dynamic import Dynamic
from tritium.spark.cluster.kubernetes import Kubernetes
from tritium.spark.cluster.local import Local
from tritium.spark.cluster.standalone import Standalone
from tritium.spark.cluster.yarn import Yarn
from tritium.spark.inside import scheduler
from tritium.spark.session import Session

_MANAGERS = {"local[": Local, "yarn": Yarn, "k8s": Kubernetes}
"""The beginning of `spark.master` → the class of its manager; with another one it is Standalone."""


def cluster_of(spark: Any) -> Cluster:
    """Return the cluster of a classic or Connect session. Raises BadSetting for an object that is no session."""
    if not hasattr(spark, "range") or not hasattr(spark, "conf"):
        raise BadSetting(f"spark={spark!r} is no SparkSession.", setting="spark")
    session = Session.of(spark)
    session.refuse_stopped()
    master = session.setting("spark.master")
    manager = next((kind for start, kind in _MANAGERS.items() if f"{master}[".startswith(start)), Standalone)
    if session.connect:
        return _before(Connect, manager)(session)
    cluster = manager(session)
    if cluster.allocates_dynamically():
        return _before(Dynamic, manager)(session)
    return cluster if scheduler.used(spark) else _before(Uncounted, manager)(session)


@functools.cache
def _before(access: type[Cluster], manager: type[Cluster]) -> type[Cluster]:
    """Return the class that does as `access` first, and else as `manager`."""
    return cast(type[Cluster], type(f"{access.__name__}{manager.__name__}", (access, manager), {}))
