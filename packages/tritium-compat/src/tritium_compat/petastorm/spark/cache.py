"""Copies of DataFrames in Parquet: where they are, which are equal, when they are deleted (driver)."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import getpass
import logging
import os
import tempfile
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlparse

import pyarrow.fs

from tritium.integration import suggest
from tritium_compat.petastorm.fs_utils import get_filesystem_and_path_or_paths, normalize_dir_url

log = logging.getLogger(__name__)

PARENT_CACHE_DIR_URL_CONF = "petastorm.spark.converter.parentCacheDirUrl"
_CODECS = ("uncompressed", "bzip2", "gzip", "lz4", "snappy", "deflate", "zstd")
_SMALL = 50 << 20  # bytes of a file below which many files are slow to read


@dataclass(frozen=True)
class _Copy:
    url: str
    df: Any
    settings: tuple[Any, ...]


_copies: list[_Copy] = []
_lock = threading.Lock()


def session() -> Any:
    """Return the Spark session; RuntimeError on an executor."""
    from pyspark import TaskContext
    from pyspark.sql import SparkSession

    if TaskContext.get() is not None:
        raise RuntimeError(
            "make_spark_converter is called on the driver. Take the converter into the function instead."
        )
    return SparkSession.active()


def parent_url(spark: Any) -> str:
    """Return the directory of copies. With a local Spark it needs no setting."""
    url = spark.conf.get(PARENT_CACHE_DIR_URL_CONF, None)
    if url is None:
        if not str(spark.conf.get("spark.master", "")).startswith("local"):
            raise ValueError(
                f'Set where copies of DataFrames go, a directory that all hosts share: spark.conf.set("'
                f'{PARENT_CACHE_DIR_URL_CONF}", "hdfs://…").'
            )
        url = f"file://{_local_parent()}"
    url = normalize_dir_url(url)
    if not urlparse(url).scheme:
        raise ValueError(f"{PARENT_CACHE_DIR_URL_CONF}={url!r} has no scheme. Write file://{os.path.abspath(url)}.")
    return url


def _local_parent() -> str:
    return f"{tempfile.gettempdir()}/petastorm-{getpass.getuser()}"


def readable_url(url: str) -> str:
    """Return the URL of a directory that is read as it is. On Databricks, dbfs:/x is file:/dbfs/x."""
    url = normalize_dir_url(url)
    if not urlparse(url).scheme:
        raise ValueError(f"The URL {url!r} has no scheme. Write file://{os.path.abspath(url)}.")
    if url.startswith("dbfs:/") and os.path.isdir("/dbfs"):
        return f"file:///dbfs/{url.removeprefix('dbfs:').lstrip('/')}"
    return url


def copy(spark: Any, df: Any, row_group_bytes: int, codec: str, dtype: str | None) -> str:
    """Return the URL of a DataFrame's copy, which is made unless an equal one is there."""
    if codec.lower() not in _CODECS:
        raise RuntimeError(f"compression_codec={codec!r}.{suggest(codec, _CODECS)}")
    if dtype not in (None, "float32", "float64"):
        raise ValueError(f'dtype={dtype!r}: "float32", "float64" or None.')
    settings = (parent_url(spark), row_group_bytes, codec.lower(), dtype)
    with _lock:
        for each in _copies:
            if each.settings == settings and each.df.sparkSession is df.sparkSession and each.df.sameSemantics(df):
                return each.url
        started = datetime.datetime.now().strftime("%Y%m%d%H%M%S")
        application = spark.conf.get("spark.app.id", "unknown")
        url = f"{settings[0]}/{started}-appid-{application}-{uuid.uuid4()}"
        writer = converted(df, dtype).write.option("compression", codec).option("parquet.block.size", row_group_bytes)
        atexit.register(_delete_at_exit, url)
        writer.parquet(url)
        _copies.append(_Copy(url, df, settings))
        return url


def converted(df: Any, dtype: str | None) -> Any:
    """Return a DataFrame with its vectors as arrays, and floating columns in the precision of `dtype`."""
    from pyspark.ml.functions import vector_to_array
    from pyspark.sql import functions as F
    from pyspark.sql.types import ArrayType, DoubleType, FloatType

    wanted = {"float32": "float", "float64": "double"}.get(dtype or "")
    columns = []
    for field in df.schema:
        column, kind = F.col(f"`{field.name}`"), field.dataType
        element = kind.elementType if isinstance(kind, ArrayType) else kind
        if kind.typeName() in ("vector", "vectorudt"):
            column = vector_to_array(column, dtype or "float64")
        elif wanted and isinstance(element, (FloatType, DoubleType)) and element.typeName() != wanted:
            log.warning("The column %r is stored as %s (dtype=%r of make_spark_converter).", field.name, wanted, dtype)
            column = column.cast(f"array<{wanted}>" if isinstance(kind, ArrayType) else wanted)
        columns.append(column.alias(field.name))
    return df.select(*columns)


def forget(url: str) -> None:
    """Delete a copy."""
    with _lock:
        _copies[:] = [each for each in _copies if each.url != url]
    _delete(url)


def _default_delete(url: str) -> None:
    filesystem, path = get_filesystem_and_path_or_paths(url)
    if filesystem.get_file_info(path).type == pyarrow.fs.FileType.Directory:
        filesystem.delete_dir(path)
    if os.path.dirname(path) == _local_parent():
        with contextlib.suppress(OSError):  # other copies are in it
            os.rmdir(_local_parent())


_delete: Callable[[str], Any] = _default_delete


def register_delete_dir_handler(handler: Callable[[str], Any] | None) -> None:
    """Let copies be deleted by a function of their URL; None: by ours."""
    global _delete
    _delete = handler or _default_delete


def _delete_at_exit(url: str) -> None:
    try:
        _delete(url)
    except Exception as error:  # noqa: BLE001  # stores raise anything; the end of a program is no place to fail
        log.warning("The copy %s of a DataFrame could not be deleted: %r", url, error)


def warn_of_small_files(urls: list[str]) -> None:
    """Log where half of the files are so small that reading them is slow."""
    if len(urls) < 2:
        return
    filesystem, paths = get_filesystem_and_path_or_paths(urls)
    sizes = sorted(info.size or 0 for info in filesystem.get_file_info(paths))
    if sizes[len(sizes) // 2] < _SMALL:
        log.warning(
            "Half of the %d files have %d bytes at most (%d together), and less than 50 MB are slow to read. Make "
            "fewer: "
            "df.coalesce(n). %s, …",
            len(sizes),
            sizes[len(sizes) // 2],
            sum(sizes),
            urls[0],
        )
