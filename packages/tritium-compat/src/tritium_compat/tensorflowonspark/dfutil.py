"""`tensorflowonspark.dfutil`: refused by name, with what takes its place (driver)."""

from __future__ import annotations

from typing import Any, NoReturn

_WHY = (
    "it reads and writes by a Hadoop format of a jar, which is not here. A DataFrame needs no TFRecords on the way to "
    "TensorFlow: give it as data= to tr.launch or fit KerasEstimator on it. Files that exist are read in the ranks by "
    "tf.data.TFRecordDataset, or by Spark with the package spark-tfrecord."
)


def saveAsTFRecords(df: Any, output_dir: str) -> NoReturn:
    """Refuse by name."""
    raise NotImplementedError(f"dfutil.saveAsTFRecords: {_WHY}")


def loadTFRecords(sc: Any, input_dir: str, binary_features: Any = ()) -> NoReturn:
    """Refuse by name."""
    raise NotImplementedError(f"dfutil.loadTFRecords: {_WHY}")


def isLoadedDF(df: Any) -> bool:
    """Return False: there are none."""
    return False
