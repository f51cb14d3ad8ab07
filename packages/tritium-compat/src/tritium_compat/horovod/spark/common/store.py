"""`Store`: where a run keeps checkpoints, logs and prepared data: a directory, or any URL of fsspec (driver, rank).

The layout is Horovod's: `PREFIX/runs/RUN_ID/checkpoint`, `PREFIX/runs/RUN_ID/logs`, `PREFIX/intermediate_train_data.0`.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fsspec.core import split_protocol, url_to_fs  # type: ignore[import-untyped]

from tritium.errors import BadSetting


class Store:
    """The interface of a store. `Store.create(path)` returns the one for a path or URL."""

    storage_options: Mapping[str, Any] | None = None
    checkpoint_filename: str
    _train_path: str
    _val_path: str
    _test_path: str
    _runs_path: str
    _save_runs: bool

    @staticmethod
    def create(prefix_path: str, *args: Any, **options: Any) -> FilesystemStore:
        """Return the store for `hdfs://…`, a DBFS path, a local path, or any other URL of fsspec."""
        if HDFSStore.matches(prefix_path):
            return HDFSStore(prefix_path, *args, **options)
        if DBFSLocalStore.matches_dbfs(prefix_path) and (is_databricks() or prefix_path.startswith("dbfs:/")):
            return DBFSLocalStore(prefix_path, *args, **options)
        return FilesystemStore(prefix_path, *args, **options)

    def get_train_data_path(self, idx: int | None = None) -> str:
        """Return the path of the rows to train on that `prepare_data` has written."""
        return self._train_path if idx is None else f"{self._train_path}.{idx}"

    def get_val_data_path(self, idx: int | None = None) -> str:
        """Return the path of the rows to validate on that `prepare_data` has written."""
        return self._val_path if idx is None else f"{self._val_path}.{idx}"

    def get_test_data_path(self, idx: int | None = None) -> str:
        """Return the path for rows to test on."""
        return self._test_path if idx is None else f"{self._test_path}.{idx}"

    def saving_runs(self) -> bool:
        """Return whether checkpoints and logs are kept."""
        return self._save_runs

    def get_runs_path(self) -> str:
        """Return the path of all runs."""
        return self._runs_path

    def get_run_path(self, run_id: str) -> str:
        """Return the path of a run."""
        return posixpath.join(self.get_runs_path(), run_id)

    def get_checkpoint_path(self, run_id: str) -> str | None:
        """Return the path below which a run keeps its checkpoint; None where runs are not kept."""
        return self.get_run_path(run_id) if self._save_runs else None

    def get_checkpoint_filename(self) -> str:
        """Return the name of the checkpoint's file."""
        return self.checkpoint_filename

    def get_logs_path(self, run_id: str) -> str | None:
        """Return the path of a run's logs; None where runs are not kept."""
        return posixpath.join(self.get_run_path(run_id), self.get_logs_subdir()) if self._save_runs else None

    def get_logs_subdir(self) -> str:
        """Return the name of the folder of the logs."""
        return "logs"

    def to_remote(self, run_id: str, dataset_idx: int | None = None) -> SimpleNamespace:
        """Return the paths of a run, and what a rank does with them."""
        return SimpleNamespace(
            train_data_path=self.get_train_data_path(dataset_idx),
            val_data_path=self.get_val_data_path(dataset_idx),
            test_data_path=self.get_test_data_path(dataset_idx),
            saving_runs=self.saving_runs(),
            runs_path=self.get_runs_path(),
            run_path=self.get_run_path(run_id),
            checkpoint_path=self.get_checkpoint_path(run_id),
            logs_path=self.get_logs_path(run_id),
            checkpoint_filename=self.get_checkpoint_filename(),
            logs_subdir=self.get_logs_subdir(),
            get_local_output_dir=self.get_local_output_dir_fn(run_id),
            sync=self.sync_fn(run_id),
        )

    def get_local_output_dir_fn(self, run_id: str) -> Callable[[], contextlib.AbstractContextManager[str]]:
        """Return a function that gives a context with a new local directory, for what `sync_fn` uploads."""
        return _local_directory

    def sync_fn(self, run_id: str) -> Callable[[str], None]:
        """Return a function that uploads what is new in a local directory to the run's path."""
        raise NotImplementedError


class FilesystemStore(Store):
    """A store on any file system that fsspec knows.

    prefix_path : a local path, or a URL. train_path, val_path, test_path, runs_path : other places than below it.
    save_runs : whether checkpoints and logs are kept.
    storage_options : what fsspec needs to open it.
    """

    def __init__(
        self,
        prefix_path: str,
        train_path: str | None = None,
        val_path: str | None = None,
        test_path: str | None = None,
        runs_path: str | None = None,
        save_runs: bool = True,
        storage_options: Mapping[str, Any] | None = None,
        checkpoint_filename: str | None = None,
    ) -> None:
        self.storage_options = dict(storage_options or {})
        self.prefix_path = self.get_full_path(prefix_path)
        self.protocol = split_protocol(self.prefix_path)[0]
        try:
            self._fs, _ = url_to_fs(self.prefix_path, **self.storage_options)
        except (ImportError, OSError, ValueError) as error:
            raise BadSetting(f"The store {prefix_path!r} can't be opened: {error}", store=prefix_path) from error
        self._train_path = self._below(train_path, "intermediate_train_data")
        self._val_path = self._below(val_path, "intermediate_val_data")
        self._test_path = self._below(test_path, "intermediate_test_data")
        self._runs_path = self._below(runs_path, "runs")
        self._save_runs = save_runs
        self.checkpoint_filename = checkpoint_filename or "checkpoint"

    @classmethod
    def matches(cls, path: str) -> bool:
        """Return True: every path is one of fsspec's."""
        return True

    # ---- paths

    def _below(self, path: str | None, name: str) -> str:
        return posixpath.join(self.prefix_path, name) if path is None else self.get_full_path(path)

    def get_full_path(self, path: str) -> str:
        """Return the path as a URL."""
        return path if split_protocol(path)[0] is not None else Path(os.path.abspath(path)).as_uri()

    def get_full_path_fn(self) -> Callable[[str], str]:
        """Return `get_full_path`."""
        return self.get_full_path

    def get_localized_path(self, path: str) -> str:
        """Return the path without its protocol."""
        return str(split_protocol(path)[1])

    # ---- files

    @property
    def fs(self) -> Any:
        """The file system of fsspec."""
        return self._fs

    def get_filesystem(self) -> Any:
        """Return the file system of fsspec."""
        return self.fs

    def exists(self, path: str) -> bool:
        """Return whether there is a file or directory."""
        return bool(self.fs.exists(self.get_localized_path(path)))

    def read(self, path: str) -> bytes:
        """Return the contents of a file."""
        return bytes(self.fs.cat_file(self.get_localized_path(path)))

    def write_text(self, path: str, text: str) -> None:
        """Write a text file, and the directories that it needs."""
        place = self.get_localized_path(path)
        self.fs.makedirs(posixpath.dirname(place), exist_ok=True)
        self.fs.pipe_file(place, text.encode())

    def is_parquet_dataset(self, path: str) -> bool:
        """Return whether Parquet can be read there."""
        try:
            return self.get_parquet_dataset(path) is not None
        except (OSError, ValueError):
            return False

    def get_parquet_dataset(self, path: str) -> Any:
        """Return a `pyarrow.parquet.ParquetDataset`."""
        from pyarrow import parquet

        return parquet.ParquetDataset(self.get_localized_path(path), filesystem=self.fs)

    def get_checkpoints(self, run_id: str, suffix: str = ".ckpt") -> list[str]:
        """Return the paths of a run's files that end so."""
        names = self.fs.ls(self.get_localized_path(self.get_run_path(run_id)), detail=False)
        return sorted(str(name) for name in names if str(name).endswith(suffix))

    # ---- what a rank does with it

    def sync_fn(self, run_id: str) -> Callable[[str], None]:
        """Return a function that uploads what is new in a local directory to the run's path."""
        return Sync(self, run_id)


class Sync:
    """Uploads the files of a local directory that have changed since the last call."""

    def __init__(self, store: FilesystemStore, run_id: str) -> None:
        self._store, self._path = store, store.get_localized_path(store.get_run_path(run_id))
        self._uploaded: dict[str, tuple[float, int]] = {}

    def __call__(self, directory: str) -> None:
        """Upload the directory's files to the run's path."""
        for file in sorted(path for path in Path(directory).rglob("*") if path.is_file()):
            name, stat = file.relative_to(directory).as_posix(), file.stat()
            if self._uploaded.get(name) == (stat.st_mtime, stat.st_size):
                continue
            target = posixpath.join(self._path, name)
            self._store.fs.makedirs(posixpath.dirname(target), exist_ok=True)
            self._store.fs.put_file(str(file), target)
            self._uploaded[name] = stat.st_mtime, stat.st_size


@contextlib.contextmanager
def _local_directory() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as directory:
        yield directory


AbstractFilesystemStore = FilesystemStore


class LocalStore(FilesystemStore):
    """The same as FilesystemStore."""


class HDFSStore(FilesystemStore):
    """A store on HDFS: `hdfs://namenode:8020/user/x`, `hdfs:///user/x`, or `/user/x`.

    host, port, user, kerb_ticket, extra_conf : what pyarrow's HadoopFileSystem takes. `driver` is not needed.
    """

    FS_PREFIX = "hdfs://"

    def __init__(
        self,
        prefix_path: str,
        host: str | None = None,
        port: int | None = None,
        user: str | None = None,
        kerb_ticket: str | None = None,
        driver: str = "libhdfs",
        extra_conf: Mapping[str, str] | None = None,
        *args: Any,
        **options: Any,
    ) -> None:
        found = re.fullmatch(
            r"(?:(?P<scheme>.+)://)?(?P<host>[^/:]+)?(?::(?P<port>[0-9]+))?(?P<path>/.*)?", prefix_path
        )
        if found is None or not found["path"]:
            raise ValueError(f"Failed to parse path from URL: {prefix_path}")
        if found["scheme"] not in (None, "hdfs"):
            raise ValueError(
                f"Mismatched HDFS namespace for URL: {prefix_path}. Found {found['scheme']}:// but expected hdfs://"
            )
        place = (found["host"] or "") + (f":{found['port']}" if found["port"] else "")
        self._url_prefix = f"{self.FS_PREFIX}{place}"
        given = {"host": host, "port": port, "user": user, "kerb_ticket": kerb_ticket, "extra_conf": extra_conf}
        given = {name: value for name, value in given.items() if value is not None}
        options["storage_options"] = {**given, **(options.get("storage_options") or {})}
        super().__init__(prefix_path, *args, **options)

    @classmethod
    def matches(cls, path: str) -> bool:
        """Return whether it is a URL of HDFS."""
        return path.startswith(cls.FS_PREFIX)

    def get_full_path(self, path: str) -> str:
        """Return the path as a URL."""
        return path if self.matches(path) else self._url_prefix + path

    def get_localized_path(self, path: str) -> str:
        """Return the path without protocol, host and port."""
        return path[len(self._url_prefix) :] if path.startswith(self._url_prefix) else path


class DBFSLocalStore(FilesystemStore):
    """A store on Databricks' file system: `dbfs:/…`, `/dbfs/…`, `file:/dbfs/…` or `file:///dbfs/…`."""

    def __init__(self, prefix_path: str, *args: Any, **options: Any) -> None:
        super().__init__(self.normalize_path(prefix_path), *args, **options)

    @classmethod
    def matches_dbfs(cls, path: str) -> bool:
        """Return whether it is a path of DBFS."""
        return (path.startswith("dbfs:/") and not path.startswith("dbfs://")) or path.startswith(
            ("/dbfs/", "file:///dbfs/", "file:/dbfs/")
        )

    @classmethod
    def normalize_path(cls, path: str) -> str:
        """Return the path as `/dbfs/…`. Raises ValueError."""
        if not cls.matches_dbfs(path):
            raise ValueError(
                f"The provided path is not a DBFS path: {path}. Please provide a path starting with `/dbfs/...` or "
                "`dbfs:/...` or `file:/dbfs/...` or `file:///dbfs/...`."
            )
        return "/dbfs" + path[5:] if path.startswith("dbfs:/") else path[path.index("/dbfs/") :]

    def get_full_path(self, path: str) -> str:
        """Return the path as a URL of the file system on which DBFS is mounted."""
        return "file://" + self.normalize_path(path)

    def get_localized_path(self, path: str) -> str:
        """Return the path as `/dbfs/…`."""
        return self.normalize_path(path)


def is_databricks() -> bool:
    """Return whether this is a cluster of Databricks."""
    return "DATABRICKS_RUNTIME_VERSION" in os.environ


__all__ = [
    "AbstractFilesystemStore",
    "DBFSLocalStore",
    "FilesystemStore",
    "HDFSStore",
    "LocalStore",
    "Store",
]
