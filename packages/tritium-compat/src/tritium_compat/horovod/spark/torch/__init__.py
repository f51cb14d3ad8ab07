"""`horovod.spark.torch`: an estimator for PyTorch modules (driver)."""

from tritium_compat.horovod.spark.torch.estimator import TorchEstimator, TorchModel

__all__ = ["TorchEstimator", "TorchModel"]
