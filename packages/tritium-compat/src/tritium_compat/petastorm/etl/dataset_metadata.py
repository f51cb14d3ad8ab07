"""`materialize_dataset`: what Spark writes becomes a data set with a Unischema (driver)."""

from __future__ import annotations

import contextlib
import json
import posixpath
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pyarrow.fs
import pyarrow.parquet as pq

from tritium.errors import BadSetting, TritiumWarning
from tritium.integration.spark import hadoop_settings, is_connect
from tritium_compat.petastorm.dataset import Dataset
from tritium_compat.petastorm.errors import PetastormMetadataError, PetastormMetadataGenerationError
from tritium_compat.petastorm.fs_utils import FilesystemResolver, as_arrow, get_filesystem_and_path_or_paths
from tritium_compat.petastorm.stored_schema import ROW_GROUPS_PER_FILE_KEY, UNISCHEMA_KEY, dumps
from tritium_compat.petastorm.unischema import Unischema


@contextlib.contextmanager
def materialize_dataset(
    spark: Any,
    dataset_url: str,
    schema: Unischema,
    row_group_size_mb: int | None = None,
    use_summary_metadata: bool = False,
    filesystem_factory: Callable[[], Any] | None = None,
) -> Iterator[None]:
    """Add a Unischema to what is written to `dataset_url` within the `with` block.

    row_group_size_mb : the size of the files' row groups.
    use_summary_metadata : not needed: the numbers of row groups are stored in any case.
    filesystem_factory : opens the file system that the metadata are written to; None: that of the URL.
    """
    if use_summary_metadata:
        note = (
            "materialize_dataset: use_summary_metadata is not needed; the numbers of row groups are stored in any case."
        )
        warnings.warn(note, TritiumWarning, stacklevel=3)
    contents = dumps(schema)  # before hours of writing, not after
    with _hadoop_settings(spark, row_group_size_mb):
        yield
    resolver = FilesystemResolver(dataset_url) if filesystem_factory is None else None
    if resolver is not None:
        filesystem, path = resolver.filesystem(), resolver.get_dataset_path()
    else:
        assert filesystem_factory is not None
        filesystem, path = get_filesystem_and_path_or_paths(dataset_url, filesystem=as_arrow(filesystem_factory()))
    try:
        dataset = Dataset(filesystem, path.rstrip("/"))
    except FileNotFoundError as error:
        raise PetastormMetadataGenerationError(
            f"Nothing was written to {dataset_url} within materialize_dataset. Write the DataFrame there, inside of "
            "the `with` block."
        ) from error
    _add(dataset, {UNISCHEMA_KEY: contents, ROW_GROUPS_PER_FILE_KEY: json.dumps(_row_groups(dataset)).encode()})


@contextlib.contextmanager
def _hadoop_settings(spark: Any, row_group_size_mb: int | None) -> Iterator[None]:
    """Set the size of row groups for the time of the block."""
    wanted = {} if row_group_size_mb is None else {"parquet.block.size": str(row_group_size_mb * 1024 * 1024)}
    # A row of images can be large: the writer looks often whether a row group is full.
    wanted |= {"parquet.block.size.row.check.min": "3", "parquet.page.size.row.check.min": "3"}
    if is_connect(spark):
        if row_group_size_mb is None:  # Spark Connect has no Hadoop settings; a writer's options do the same
            yield
            return
        raise BadSetting(
            f"materialize_dataset(row_group_size_mb={row_group_size_mb}) can't set it through Spark Connect. Leave it "
            "out, "
            f'and write with .option("parquet.block.size", {row_group_size_mb} * 1024 * 1024).',
            setting="row_group_size_mb",
        )
    with hadoop_settings(spark.sparkContext, wanted):
        yield


def _row_groups(dataset: Dataset) -> dict[str, int]:
    """Return how many row groups each file has, by its path below the directory."""
    found = {posixpath.relpath(file.path, str(dataset.path)): 0 for file in dataset.files}
    for group in dataset.row_groups(counted=True):
        found[posixpath.relpath(group.file.path, str(dataset.path))] += 1
    return found


def _add(dataset: Dataset, entries: Mapping[bytes, bytes]) -> None:
    """Write entries to the file _common_metadata, beside those that are there."""
    schema = dataset.footer(dataset.files[0].path).schema.to_arrow_schema()
    schema = schema.with_metadata({**(schema.metadata or {}), **dataset.common_metadata, **entries})
    path = posixpath.join(str(dataset.path), "_common_metadata")
    with dataset.filesystem.open_output_stream(path) as file:
        pq.write_metadata(schema, file)
    checksum = posixpath.join(str(dataset.path), "._common_metadata.crc")  # Hadoop's, of the file as it was
    if dataset.filesystem.get_file_info(checksum).type == pyarrow.fs.FileType.File:
        dataset.filesystem.delete_file(checksum)


def get_schema_from_dataset_url(
    dataset_url_or_urls: str | list[str],
    hdfs_driver: str = "libhdfs",
    storage_options: Mapping[str, Any] | None = None,
    filesystem: Any = None,
) -> Unischema:
    """Return the Unischema of a data set; PetastormMetadataError where it has none."""
    found = get_filesystem_and_path_or_paths(
        dataset_url_or_urls, storage_options=storage_options, filesystem=filesystem
    )
    return Dataset(*found).unischema


__all__ = [
    "PetastormMetadataError",
    "PetastormMetadataGenerationError",
    "get_schema_from_dataset_url",
    "materialize_dataset",
]
