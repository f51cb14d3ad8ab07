"""`petastorm.spark`: a DataFrame as a cached copy in Parquet, for loaders in any process (driver and rank)."""

from tritium_compat.petastorm.spark.spark_dataset_converter import SparkDatasetConverter, make_spark_converter

__all__ = ["SparkDatasetConverter", "make_spark_converter"]
