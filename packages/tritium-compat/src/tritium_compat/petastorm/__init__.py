"""Petastorm's API on pyarrow: readers of Parquet, with its codecs and its converter of DataFrames (driver and rank)."""

from tritium_compat.petastorm.errors import NoDataAvailableError
from tritium_compat.petastorm.reader import make_batch_reader, make_reader
from tritium_compat.petastorm.transform import TransformSpec

__version__ = "0.13.1"  # whose API this is

__all__ = ["NoDataAvailableError", "TransformSpec", "make_batch_reader", "make_reader"]
