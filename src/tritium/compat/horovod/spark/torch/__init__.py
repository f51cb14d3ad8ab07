"""`horovod.spark.torch`: an estimator for PyTorch modules (driver)."""

from tritium.compat.horovod.spark.torch.estimator import TorchEstimator, TorchModel

__all__ = ["TorchEstimator", "TorchModel"]
