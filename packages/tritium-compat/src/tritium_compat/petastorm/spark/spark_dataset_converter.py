"""`SparkDatasetConverter`: data loaders over the copy of a DataFrame (driver and rank)."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow.fs

from tritium_compat.petastorm.fs_utils import get_filesystem_and_path_or_paths
from tritium_compat.petastorm.reader import Reader, make_batch_reader
from tritium_compat.petastorm.spark import cache
from tritium_compat.petastorm.spark.cache import register_delete_dir_handler

log = logging.getLogger(__name__)

DEFAULT_ROW_GROUP_SIZE_BYTES = 32 * 1024 * 1024
_WORKERS = 4
_WAIT = 30  # seconds until all files of a copy must be there
_RANKS = (
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("RANK", "WORLD_SIZE"),
)


class SparkDatasetConverter:
    """A copy of a DataFrame in Parquet. Can be pickled, and used wherever the copy can be read.

    cache_dir_url : where the copy is.
    file_urls : its files.
    dataset_size : its rows, which `len` also returns.
    """

    PARENT_CACHE_DIR_URL_CONF = cache.PARENT_CACHE_DIR_URL_CONF

    def __init__(self, cache_dir_url: str, file_urls: list[str], dataset_size: int) -> None:
        """Describe a copy. Called by `make_spark_converter`."""
        self.cache_dir_url, self.file_urls, self.dataset_size = cache_dir_url, file_urls, dataset_size

    def __len__(self) -> int:
        return self.dataset_size

    @contextmanager
    def make_torch_dataloader(
        self,
        batch_size: int = 32,
        num_epochs: int | None = None,
        workers_count: int | None = None,
        shuffling_queue_capacity: int = 0,
        data_loader_fn: Callable[..., Any] | None = None,
        **petastorm_reader_kwargs: Any,
    ) -> Iterator[Any]:
        """Return a context manager of a loader of batches: dicts of tensors.

        num_epochs : None: without end.
        workers_count : threads that read; None: 4.
        shuffling_queue_capacity : a batch is drawn from as many waiting rows; 0: rows stay in order.
        data_loader_fn : makes the loader of `reader=`, `batch_size=`, `shuffling_queue_capacity=`; None: `DataLoader`
            of `petastorm.pytorch`.
        petastorm_reader_kwargs : for `make_batch_reader`: cur_shard, shard_count, transform_spec, seed, …
        """
        from tritium_compat.petastorm.pytorch import DataLoader

        with self._reader(num_epochs, workers_count, petastorm_reader_kwargs) as reader:
            make = data_loader_fn or DataLoader
            yield make(reader=reader, batch_size=batch_size or 32, shuffling_queue_capacity=shuffling_queue_capacity)

    @contextmanager
    def make_tf_dataset(
        self,
        batch_size: int | None = None,
        prefetch: int | None = None,
        num_epochs: int | None = None,
        workers_count: int | None = None,
        shuffling_queue_capacity: int | None = None,
        **petastorm_reader_kwargs: Any,
    ) -> Iterator[Any]:
        """Return a context manager of a tf.data.Dataset of batches: named tuples of tensors.

        batch_size : None: 32.
        prefetch : batches that TensorFlow keeps ready; None: as many as it chooses.
        num_epochs : None: without end.
        workers_count : threads that read; None: 4.
        shuffling_queue_capacity : the rows that TensorFlow shuffles among; None or 0: rows stay in order.
        petastorm_reader_kwargs : for `make_batch_reader`: cur_shard, shard_count, transform_spec, seed, …
        """
        import tensorflow as tf

        from tritium_compat.petastorm.tf_utils import make_petastorm_dataset

        with self._reader(num_epochs, workers_count, petastorm_reader_kwargs) as reader:
            dataset, size = make_petastorm_dataset(reader), batch_size or 32
            if shuffling_queue_capacity:
                dataset = dataset.unbatch().shuffle(shuffling_queue_capacity).batch(size)
            else:
                dataset = dataset.rebatch(size)  # whole row groups at once: four times as fast as row by row
            yield dataset.prefetch(tf.data.AUTOTUNE if prefetch is None else prefetch)

    @contextmanager
    def _reader(self, num_epochs: int | None, workers: int | None, settings: dict[str, Any]) -> Iterator[Reader]:
        _compare_with_rank(settings.get("cur_shard"), settings.get("shard_count"))
        wait_for_files(self.file_urls)
        count = _WORKERS if workers is None else workers
        with make_batch_reader(self.file_urls, num_epochs=num_epochs, workers_count=count, **settings) as reader:
            yield reader

    def delete(self) -> None:
        """Delete the copy. An equal DataFrame is then copied again."""
        cache.forget(self.cache_dir_url)


def make_spark_converter(
    df: Any,
    parquet_row_group_size_bytes: int = DEFAULT_ROW_GROUP_SIZE_BYTES,
    compression_codec: str | None = None,
    dtype: str | None = "float32",
) -> SparkDatasetConverter:
    """Copy a DataFrame to Parquet below `petastorm.spark.converter.parentCacheDirUrl`, and return its converter.

    An equal DataFrame (of the same plan and settings) is copied once. Copies are deleted when Python ends.

    df : a DataFrame, or the URL of a directory of Parquet files, which are used as they are.
    compression_codec : "uncompressed" (None), "bzip2", "gzip", "lz4", "snappy", "deflate", "zstd".
    dtype : "float32" or "float64": what floating columns, arrays and vectors become; None: they stay as they are.
    """
    spark = cache.session()
    if isinstance(df, str):
        url = cache.readable_url(df)
    else:
        url = cache.copy(spark, df, parquet_row_group_size_bytes, compression_codec or "uncompressed", dtype)
    rows = spark.read.parquet(url)
    files = list(rows.inputFiles())
    cache.warn_of_small_files(files)
    return SparkDatasetConverter(url, files, rows.count())


def wait_for_files(urls: list[str]) -> None:
    """Wait until all files can be seen: some stores show them late. RuntimeError after 30 s."""
    filesystem, paths = get_filesystem_and_path_or_paths(urls)
    until = time.monotonic() + _WAIT
    pause = 0.05
    while True:
        found = filesystem.get_file_info(paths)
        missing = [url for url, info in zip(urls, found, strict=True) if info.type == pyarrow.fs.FileType.NotFound]
        if not missing:
            return
        if time.monotonic() > until:
            raise RuntimeError(
                f"{len(missing)} of {len(urls)} files of the converter are not there after {_WAIT} s, such as "
                f"{missing[0]}. The directory of {cache.PARENT_CACHE_DIR_URL_CONF} must be one that all hosts share, "
                "and the converter's delete() must come after the training."
            )
        time.sleep(pause)  # no store tells when a file appears
        pause = min(2 * pause, 1.0)


def _compare_with_rank(shard: Any, shards: Any) -> None:
    """Warn of a shard that is not this rank's."""
    for rank, size in _RANKS:
        if rank in os.environ and size in os.environ:
            given, own = (shard, shards), (int(os.environ[rank]), int(os.environ[size]))
            if given != own and own != (0, 1):
                log.warning(
                    "cur_shard=%s, shard_count=%s, but this is rank %s of %s. For a shard a rank pass hvd.rank() and "
                    "hvd.size().",
                    *given,
                    *own,
                )
            return


__all__ = ["SparkDatasetConverter", "make_spark_converter", "register_delete_dir_handler"]
