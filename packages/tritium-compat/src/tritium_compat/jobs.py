"""How the classes and functions of other libraries start a gang (driver)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tritium import launch
from tritium.errors import BadSetting


def slots(spark: Any = None) -> int:
    """Return how many tasks run at once by Spark's own count (`spark.default.parallelism`)."""
    from pyspark.sql import SparkSession

    session = spark or SparkSession.getActiveSession()
    if session is None:
        raise BadSetting("There is no active SparkSession. Make one, or say how many ranks there shall be.")
    return int(session.sparkContext.defaultParallelism)


def gpus() -> int:
    """Return how many GPUs a task of Spark has (`spark.task.resource.gpu.amount`); a part of one counts as one."""
    from pyspark.sql import SparkSession

    session = SparkSession.getActiveSession()
    if session is None or str(session.conf.get("spark.master", "")).startswith("local["):
        return 0
    return math.ceil(float(session.conf.get("spark.task.resource.gpu.amount", "0") or 0))


def refuse(whose: str, given: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
    """Raise BadSetting for arguments that were given, and that there is a reason to refuse."""
    wrong = [f"{whose}({name}=…): {reasons[name]}" for name, value in given.items() if name in reasons and value]
    if wrong:
        raise BadSetting(" ".join(wrong), settings=wrong)


def run(
    function: Callable[..., Any] | str,
    ranks: int | tuple[int, int],
    *,
    local: bool = False,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    **settings: Any,
) -> list[Any]:
    """Run a function or script on the cluster, or on this machine, and return the ranks' results.

    On a cluster a rank has the GPUs that a task of Spark has, unless `gpus` is among the settings.
    """
    where: Any = "driver" if local else "cluster"
    if not local:
        settings.setdefault("gpus", gpus())
    return launch(function, ranks=ranks, on=where, args=args, kwargs=kwargs, **settings)
