"""The kinds of clusters, one class each, and which of them a session has (driver)."""

from __future__ import annotations

import functools
from typing import Any, cast

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
    """Return the cluster of a classic or Connect session. Raises BadSetting where it can't be used."""
    session = Session.usable(spark)
    master = session.setting("spark.master")
    manager = next((kind for start, kind in _MANAGERS.items() if f"{master}[".startswith(start)), Standalone)
    if session.connect:
        return _class_of(Connect, manager)(session)
    kinds = (
        *([Dynamic] if manager(session).allocates_dynamically() else []),
        *([] if scheduler.used(spark) else [Uncounted]),
    )
    return _class_of(*kinds, manager)(session)


@functools.cache
def _class_of(*kinds: type[Cluster]) -> type[Cluster]:
    """Return the class that does as the first of these does, and else as the next."""
    return cast(type[Cluster], type("".join(kind.__name__ for kind in kinds), kinds, {})) if kinds[1:] else kinds[0]
