"""`horovod.spark`: `run` and `run_elastic` (driver)."""

from tritium_compat.horovod.spark.runner import run, run_elastic

__all__ = ["run", "run_elastic"]
