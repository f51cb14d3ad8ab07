"""Hadoop's file systems, as Spark's own readers and writers use them (driver; not with Connect)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tritium.spark.inside import Inside


def probe(spark: Any) -> str | None:
    """Return why Hadoop's file systems can't be used in this session; None where they can."""
    return None if Folder(spark, "file:///").exists() else "Hadoop finds no file system of this machine"


used = Inside("hadoop", probe)


class Folder:
    """A path as Hadoop understands it, with the session's settings."""

    def __init__(self, spark: Any, path: str) -> None:
        self._path = spark._jvm.org.apache.hadoop.fs.Path
        path_object = self._path(path)
        self._files = path_object.getFileSystem(spark._jsparkSession.sessionState().newHadoopConf())
        self._whole = self._files.makeQualified(path_object)
        uri = self._whole.toUri()
        self.local: str | None = uri.getPath() if uri.getScheme() == "file" else None
        """The path, where it is one of this machine."""

    def exists(self, name: str = "") -> bool:
        """Return whether the folder, or what is in it under `name`, exists."""
        return bool(self._files.exists(self._below(name)))

    def upload(self, folder: str, name: str) -> None:
        """Copy `folder/name` of this machine to `name` in this folder, which is made."""
        self._files.mkdirs(self._whole)
        self._files.copyFromLocalFile(
            False, True, self._path("file://" + os.path.join(folder, name)), self._below(name)
        )

    def download(self, name: str, folder: str) -> None:
        """Copy `name` in this folder to `folder/name` of this machine."""
        self._files.copyToLocalFile(False, self._below(name), self._path("file://" + os.path.join(folder, name)), True)

    def make(self, name: str = "") -> None:
        """Make the folder, or one of this `name` in it, and those above. Raises Spark's error where that fails."""
        self._files.mkdirs(self._below(name))

    def names(self, name: str = "") -> list[str]:
        """Return the names of what is in the folder, or in the one of this `name`; none where that does not exist."""
        if not self.exists(name):
            return []
        return sorted(str(one.getPath().getName()) for one in self._files.listStatus(self._below(name)))

    def move(self, name: str, target: str) -> bool:
        """Rename what is in the folder under `name` to `target`, and return whether that was done."""
        return bool(self._files.rename(self._below(name), self._below(target)))

    def delete(self, name: str) -> None:
        """Delete what is in the folder under `name`, with all below it, where it exists."""
        self._files.delete(self._below(name), True)

    def touch(self, name: str) -> None:
        """Make an empty file."""
        self._files.create(self._below(name), True).close()

    def _below(self, name: str) -> Any:
        return self._path(self._whole, name) if name else self._whole


def default_file_system(context: Any) -> str:
    """Return Hadoop's default file system in the settings of a SparkContext; "" without one."""
    return str(context._jsc.hadoopConfiguration().get("fs.defaultFS") or "")


@contextmanager
def settings(context: Any, values: Mapping[str, str]) -> Iterator[None]:
    """Give Hadoop's settings of a SparkContext these values within the block."""
    configuration = context._jsc.hadoopConfiguration()
    before = {key: configuration.get(key) for key in values}
    for key, value in values.items():
        configuration.set(key, value)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                configuration.unset(key)
            else:
                configuration.set(key, value)
