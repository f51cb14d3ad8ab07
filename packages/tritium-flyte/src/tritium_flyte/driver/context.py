"""Where a task runs: its Spark session, and a place that all its attempts share (the driver of a task)."""

from __future__ import annotations

import uuid
from typing import Any

import flyte

from tritium.errors import BadSetting

SESSION = "spark_session"
"""The name under which Flyte's own plug-in keeps the session in a task's context, too."""


def session() -> Any:
    """Return the Spark session of this task, as `flyte.ctx().data["spark_session"]` does.

    Raises BadSetting outside of a task of `tritium.flyte.Spark`, or where there is none of `Gang`.
    """
    task = flyte.ctx()
    spark = task.data.get(SESSION) if task and task.data else None
    if spark is None:
        raise BadSetting(
            "There is no Spark session here: this is no task of an environment with plugin_config=Spark(…) or Gang(…). "
            "Call it in one, or pass the session: table.read(spark)."
        )
    return spark


def run_dir(name: str = "") -> str:
    """Return a run directory that every attempt of this task finds again: `TorchEstimator(…, run_dir=run_dir())`.

    name : tells several trainings of one task from each other.

    The next attempt goes on from the newest checkpoint in it. Another run, or other inputs, have another one.
    Raises BadSetting outside of a task.
    """
    task = flyte.ctx()
    if not task:
        raise BadSetting("run_dir() is that of a task's attempts, and this is no task. Call it in the task's function.")
    action = task.task_action or task.action  # Flyte's `trace` replaces `action`.
    return "/".join(filter(None, [str(task.run_base_dir).rstrip("/"), "tritium", action.name, name]))


def new_place(name: str) -> str:
    """Return a path or URL in this task's place for data where nothing is yet.

    Flyte draws such names from `random`, so that two tasks with `random.seed(0)` would write to one place.
    """
    return f"{str(flyte.ctx().raw_data_path.path).rstrip('/')}/{uuid.uuid4().hex}/{name}"
