"""`horovod.spark.lightning`: an estimator for LightningModules (driver)."""

from tritium_compat.horovod.spark.lightning.estimator import TorchEstimator, TorchModel

__all__ = ["TorchEstimator", "TorchModel"]
