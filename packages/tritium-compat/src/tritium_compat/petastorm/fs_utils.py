"""The file systems that data sets lie on (any process)."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote, urlparse

import pyarrow.fs

from tritium.errors import masked


def normalize_dir_url(dataset_url: str) -> str:
    """Return the URL without a slash at its end."""
    if not isinstance(dataset_url, (str, os.PathLike)):
        raise ValueError(f"The URL of a data set is a string, not {dataset_url!r}.")
    return os.fspath(dataset_url).rstrip("/") or "/"


def get_dataset_path(parsed_url: Any) -> str:
    """Return what the file system of a parsed URL calls it: with the bucket, but for local files and HDFS."""
    if parsed_url.scheme in ("file", "hdfs", "viewfs"):
        return str(parsed_url.path)
    return f"{parsed_url.netloc}{parsed_url.path}"


class FilesystemResolver:
    """The file system of a URL, and the path on it."""

    def __init__(
        self,
        dataset_url: Any,
        hadoop_configuration: Any = None,
        connector: Any = None,
        hdfs_driver: str = "libhdfs",
        user: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Find it.

        hadoop_configuration, connector, hdfs_driver : not needed: pyarrow reads Hadoop's own configuration.
        user : as whom to access HDFS.
        storage_options : for fsspec, which opens all but local files and HDFS.
        """
        url = dataset_url if isinstance(dataset_url, str) else dataset_url.geturl()
        self._url, self._path = urlparse(url), ""
        if not self._url.scheme:
            raise ValueError(
                f"The URL {url!r} has no scheme. Write file://{os.path.abspath(url)} for a local directory."
            )
        self._make = functools.partial(_open, url, user, dict(storage_options or {}))
        self._filesystem = self._make()

    def parsed_dataset_url(self) -> Any:
        """Return the parsed URL."""
        return self._url

    def get_dataset_path(self) -> str:
        """Return the path on the file system."""
        return _path(self._url, self._filesystem)

    def filesystem(self) -> pyarrow.fs.FileSystem:
        """Return the file system."""
        return self._filesystem

    def filesystem_factory(self) -> Callable[[], pyarrow.fs.FileSystem]:
        """Return a function that opens the file system, and can be sent to executors."""
        return self._make


def _open(url: str, user: str | None, storage_options: Mapping[str, Any]) -> pyarrow.fs.FileSystem:
    parsed = urlparse(url)
    if parsed.scheme == "file" or (parsed.scheme == "dbfs" and os.path.isdir("/dbfs")):
        return pyarrow.fs.LocalFileSystem()
    if parsed.scheme in ("hdfs", "viewfs"):
        host = f"{parsed.scheme}://{parsed.hostname}" if parsed.hostname else "default"
        return pyarrow.fs.HadoopFileSystem(host, parsed.port or 0, user=user or parsed.username)
    fsspec = importlib.import_module("fsspec")
    try:
        found, _ = fsspec.core.url_to_fs(url, **storage_options)
    except (ImportError, ValueError) as error:
        raise type(error)(f"{masked(url)} can't be opened: {error}") from error
    return as_arrow(found)


def as_arrow(filesystem: Any) -> pyarrow.fs.FileSystem:
    """Return a file system of pyarrow or fsspec as one of pyarrow."""
    if isinstance(filesystem, pyarrow.fs.FileSystem):
        return filesystem
    return pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(filesystem))


def _path(parsed_url: Any, filesystem: pyarrow.fs.FileSystem) -> str:
    if parsed_url.scheme == "dbfs":
        return f"/dbfs{parsed_url.path}"
    path = get_dataset_path(parsed_url)
    if isinstance(filesystem, pyarrow.fs.LocalFileSystem) and "%" in path and not os.path.exists(path):
        return unquote(path)  # Spark's list of files has a space as %20
    return path


def get_filesystem_and_path_or_paths(
    url_or_urls: str | list[str],
    hdfs_driver: str = "libhdfs",
    storage_options: Mapping[str, Any] | None = None,
    filesystem: Any = None,
) -> tuple[pyarrow.fs.FileSystem, Any]:
    """Return the file system of a URL, or of several that share one, and the path or the paths on it.

    filesystem : of pyarrow or fsspec, instead of the URL's own.
    """
    urls = url_or_urls if isinstance(url_or_urls, list) else [url_or_urls]
    parsed = [urlparse(url) for url in urls]
    if len({(url.scheme, url.netloc) for url in parsed}) != 1:
        raise ValueError("The URLs of a list must have the same scheme and host.")
    if filesystem is None:
        found = FilesystemResolver(urls[0], storage_options=storage_options).filesystem()
    else:
        found = as_arrow(filesystem)
    paths = [_path(url, found) for url in parsed]
    return found, paths if isinstance(url_or_urls, list) else paths[0]
