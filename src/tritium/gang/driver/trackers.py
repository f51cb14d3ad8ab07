"""What ranks need to log to the driver's experiment tracker: variables of MLflow, W&B and trackio (driver)."""

from __future__ import annotations

import os
import sys

_MLFLOW = (
    *("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI", "MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_RUN_ID"),
    *("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_AUTH"),
    *("MLFLOW_TRACKING_INSECURE_TLS", "MLFLOW_WORKSPACE", "DATABRICKS_HOST", "DATABRICKS_TOKEN"),
)
_OTHERS = (
    *("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_ENTITY", "WANDB_PROJECT", "WANDB_MODE", "WANDB_DISABLED"),
    *("WANDB_RUN_ID", "WANDB_RESUME", "WANDB_RUN_GROUP", "WANDB_JOB_TYPE", "WANDB_NAME", "WANDB_NOTES", "WANDB_TAGS"),
    *("TRACKIO_PROJECT", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"),
)
"""No file and no directory is among them, as an executor may have another one of that name."""
ABOVE_0 = {"WANDB_MODE": "disabled"}
"""Variables of the ranks above 0, as a function often begins its run on every rank. trackio has none for it."""


def variables() -> dict[str, str]:
    """Return the variables of trackers in this process's environment, and those of MLflow's active run here.

    The values are often secrets. Those of MLflow, with the keys of Databricks that it reads, come only where a tracking
    server is named or a run is active; Hugging Face's token only for a Space of trackio.
    """
    env = {name: os.environ[name] for name in (*_MLFLOW, *_OTHERS) if name in os.environ}
    if "TRACKIO_SPACE_ID" in env and "HF_TOKEN" in os.environ:
        env["HF_TOKEN"] = os.environ["HF_TOKEN"]
    mlflow = sys.modules.get("mlflow")
    run = mlflow.active_run() if mlflow is not None else None
    if mlflow is not None and run is not None:
        env.pop("MLFLOW_EXPERIMENT_NAME", None)  # The run may be in another experiment.
        env["MLFLOW_TRACKING_URI"] = mlflow.get_tracking_uri()
        env["MLFLOW_EXPERIMENT_ID"] = run.info.experiment_id
        env["MLFLOW_RUN_ID"] = run.info.run_id
    if "MLFLOW_TRACKING_URI" not in env:
        env = {name: value for name, value in env.items() if name not in _MLFLOW}
    return env
