"""`horovod.spark.keras`: an estimator for Keras models (driver)."""

from tritium_compat.horovod.spark.keras.estimator import KerasEstimator, KerasModel

__all__ = ["KerasEstimator", "KerasModel"]
