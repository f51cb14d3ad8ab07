"""A gang as a task of either version of Flyte: the Spark application around it, its run (the driver of a task)."""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Callable, Mapping
from typing import Any

import tritium as tr
from tritium.errors import BadSetting
from tritium_flyte import on_rank

_DISCOVERY = "/opt/spark/examples/src/main/scripts/getGpusResources.sh"
"""Where Spark's images have the script that lists the GPUs of an executor."""


def as_spark_writes(conf: Mapping[str, Any]) -> dict[str, str]:
    """Return settings as texts, True as "true"."""
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in conf.items()}


def checked(fields: Mapping[str, Any]) -> tr.Gang:
    """Return the gang of a task's fields. Raises BadSetting for one that is wrong, or that no task can have."""
    gang = tr.Gang.of(None, dict(fields))
    if gang.on != "cluster":
        raise BadSetting(f"on={gang.on!r}: a task of Gang runs on the executors of its Spark.", setting="on")
    return gang


def application_for(gang: tr.Gang, conf: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of a Spark application that has slots for all ranks of a gang, beside those of the user.

    Raises BadSetting where the user's contradict them.
    """
    cpus = gang.cpus or int(conf.get("spark.task.cpus", 1))
    cores = int(conf.get("spark.executor.cores", cpus))
    problems = []
    if cores < cpus:
        problems.append(f"spark.executor.cores={cores} are fewer than the cpus={cpus} of a rank.")
    ranks = max(1, cores // cpus)
    gpus_wanted = gang.gpus > 0 and gang.accelerator == "gpu"  # Settings of other resources are the user's.
    if gpus_wanted and "spark.executor.resource.gpu.amount" in conf:
        gpus = int(conf["spark.executor.resource.gpu.amount"])
        if gpus < gang.gpus:
            problems.append(f"spark.executor.resource.gpu.amount={gpus} are fewer than the gpus={gang.gpus} of a rank.")
        ranks = max(1, min(ranks, int(gpus // gang.gpus)))
    executors = -(-gang.most // ranks)
    settings = {
        "spark.executor.instances": str(executors),
        "spark.executor.cores": str(cores),
        "spark.dynamicAllocation.enabled": "false",
        # The executors come, as the application is made for the gang; a node for one may take minutes.
        "spark.scheduler.minRegisteredResourcesRatio": "1.0",
        "spark.scheduler.maxRegisteredResourcesWaitingTime": f"{int(gang.start_timeout)}s",
    }
    if gpus_wanted:
        settings["spark.executor.resource.gpu.amount"] = str(math.ceil(gang.gpus * ranks))
        settings |= {
            name: conf.get(name, value)
            for name, value in (
                ("spark.executor.resource.gpu.vendor", "nvidia.com"),
                ("spark.executor.resource.gpu.discoveryScript", _DISCOVERY),
            )
        }
    if int(conf.get("spark.executor.instances", executors)) < executors:
        problems.append(
            f"spark.executor.instances={conf['spark.executor.instances']} of {cores} cores have no slots for "
            f"{gang.most} ranks: that takes {executors}."
        )
    if conf.get("spark.dynamicAllocation.enabled", "false") == "true":
        problems.append("spark.dynamicAllocation.enabled=true: the ranks of a gang start together.")
    if problems:
        raise BadSetting("Gang: " + " ".join([*problems, "Leave it to the gang."]), settings=problems)
    return {name: value for name, value in settings.items() if name not in conf or "gpu" in name}


def on_ranks(
    function: Callable[..., Any], gang: tr.Gang, values: Mapping[str, Any], data: Mapping[str, Any], spark: Any
) -> Any:
    """Run a task's function on every rank, and return the value of rank 0.

    values : arguments by name, which arrive as they are.
    data   : DataFrames by the names of further arguments; a rank gets its shards of them.
    """
    arguments = (_without_annotations(function), values, list(data))
    return tr.submit(on_rank.call, gang, args=arguments, data=dict(data) or None, spark=spark).result()[0]


def _without_annotations(function: Callable[..., Any]) -> types.FunctionType:
    """Return the function without its annotations, which name Flyte's types, and without decorators of Flyte's."""
    plain = inspect.unwrap(function)
    assert isinstance(plain, types.FunctionType)
    bare = types.FunctionType(plain.__code__, plain.__globals__, plain.__name__, plain.__defaults__, plain.__closure__)
    bare.__kwdefaults__, bare.__qualname__, bare.__doc__ = plain.__kwdefaults__, plain.__qualname__, plain.__doc__
    return bare
