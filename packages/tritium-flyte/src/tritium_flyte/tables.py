"""`Table`: rows by reference, which don't change; neither Flyte nor Spark is needed to hold one (any process)."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from tritium.errors import BadData, BadSetting, TritiumError

_GONE = re.compile("PATH_NOT_FOUND|DELTA_TABLE_NOT_FOUND|DELTA_PATH_DOES_NOT_EXIST|DELTA_VERSION_NOT_FOUND")
_COMMIT = re.compile(r"(\d{20})\.json")


class TableGone(TritiumError, FileNotFoundError):
    """The rows of a Table can't be read any more. `uri`, `version`: of the table; `missing`: one of the lost files."""

    uri: str = ""
    version: int | None = None
    missing: str | None = None


@dataclass(frozen=True)
class Table:
    """Names rows that don't change: a version of a Delta table, or Parquet that a task has written.

    As a parameter or result of a task it travels by reference: no other task copies or reads the rows. On the ranks of
    a `Gang` a parameter of this type is the rank's shard, `world.shard(name)`.

    uri     : path or URL of the table.
    format  : as Spark names it, such as "parquet" or "delta".
    version : of a Delta table; None: the table has none.
    hash    : what a cached result depends on; "": on `uri` and `version`.
    """

    uri: str
    format: str = "parquet"
    version: int | None = None
    hash: str = field(default="", compare=False)

    @classmethod
    def written(cls, df: Any) -> Table:
        """Write a DataFrame as Parquet into the task's own place, once, and return it as a Table.

        The hash is that of the schema and of all rows: equal rows give an equal hash, whatever their order, partitions
        and place, so that a later task is not run again. It is computed while the rows are written.

        Raises BadData where a column holds a map within another type, which Spark can't hash.
        """
        from pyspark.sql import Observation
        from pyspark.sql import functions as F

        from tritium_flyte.driver.context import new_place

        contents, uri = Observation(), new_place("table")
        row = F.xxhash64(*(_hashable(field) for field in df.schema.fields)).cast("decimal(38,0)")
        df.observe(contents, F.count(F.lit(1)).alias("rows"), F.sum(row).alias("sum")).write.parquet(spark_url(uri))
        figures = contents.get
        return cls(uri, hash=sha256(f"{df.schema.json()} {figures['rows']} {figures['sum']}"))

    @classmethod
    def delta(cls, uri: str, version: int | None = None) -> Table:
        """Return a version of a Delta table: the newest one, or one by its number. Nothing is copied.

        Only the names of the table's log are read, without Spark: a workflow can call it before its first task.

        Raises BadSetting where there is no such table or version.
        """
        files, path = _opened(uri)
        if files is None:
            raise BadSetting(f"{uri} is on a file system that fsspec can't read here, as Table.delta does.", path=uri)
        log = f"{str(path).rstrip('/')}/_delta_log"
        names = [str(name).rpartition("/")[2] for name in files.ls(log, detail=False)] if files.exists(log) else []
        versions = sorted(int(match[1]) for match in map(_COMMIT.fullmatch, names) if match)
        if not versions:
            raise BadSetting(f"{uri} is no Delta table: there is no commit in {log}.", path=uri)
        version = versions[-1] if version is None else version
        if version not in versions:
            raise BadSetting(
                f"The log of the Delta table {uri} has no version {version}; it has {versions[0]} to {versions[-1]}.",
                path=uri,
            )
        # A commit's file differs from that of any other table, also of one that replaces this one at its place.
        commit = files.cat_file(f"{log}/{version:020d}.json")
        return cls(uri, "delta", version, f"delta:{version}:{hashlib.sha256(commit).hexdigest()}")

    def read(self, spark: Any = None) -> Any:
        """Return the rows as a DataFrame.

        spark : the session; None takes that of this task.

        Raises TableGone where the place was deleted, or files of this version were (VACUUM): a cached Table outlives
        its rows.
        """
        if spark is None:
            from tritium_flyte.driver.context import session

            spark = session()
        reader = spark.read.format(self.format)
        if self.version is not None:
            reader = reader.option("versionAsOf", self.version)
        self._check_place()
        try:
            df = reader.load(spark_url(self.uri))
        except Exception as error:
            if _GONE.search(str(error)):
                raise self._gone(str(error).partition("\n")[0]) from error
            raise
        if self.format == "delta":
            self._check_files(df.inputFiles())
        return df

    def _check_place(self) -> None:
        files, path = _opened(self.uri)
        if files is None:
            return
        if not files.exists(path):
            raise self._gone("there is nothing at its place")
        if self.format == "parquet" and not files.isfile(path) and not any(map(_is_data, files.find(path))):
            raise self._gone("there is no file at its place")

    def _check_files(self, wanted: list[str]) -> None:
        """Raise TableGone for the first file of this version that is not there: Delta would miss it within a job."""
        files, path = _opened(self.uri)
        if files is None:
            return
        names = {str(name).rpartition("/")[2] for name in files.find(path)}
        for url in wanted:
            if unquote(url).rpartition("/")[2] not in names:
                raise self._gone("a file of it was deleted, as VACUUM does with versions older than it keeps", url)

    def _gone(self, reason: str, missing: str | None = None) -> TableGone:
        what = self.uri if self.version is None else f"version {self.version} of {self.uri}"
        return TableGone(
            f"The rows of {what} can't be read any more: {reason}{f' ({missing})' if missing else ''}. A cached result "
            "outlives the files that it names. "
            + (
                'Have its task run again: cache(salt="2"), or, on a backend, the run\'s overwrite_cache=True.'
                if self.version is None
                else "Name a version that is still there."
            ),
            uri=self.uri,
            version=self.version,
            missing=missing,
        )


def _opened(uri: str) -> tuple[Any, str]:
    """Return fsspec's file system and the path in it; None where fsspec does not know it, as Spark may."""
    import fsspec  # type: ignore[import-untyped]

    try:
        files, path = fsspec.core.url_to_fs(uri)
    except (ImportError, ValueError, OSError):
        return None, uri
    files.invalidate_cache()
    return files, str(path)


def sha256(text: str) -> str:
    """Return a hash in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def spark_url(url: str) -> str:
    """Return a URL as Spark's Hadoop knows it: Flyte's `s3://` is its `s3a://`."""
    return f"s3a://{url.removeprefix('s3://')}" if url.startswith("s3://") else url


def _is_data(path: Any) -> bool:
    return not str(path).rpartition("/")[2].startswith(("_", "."))


def _hashable(column: Any) -> Any:
    """Return a column that Spark can hash. Of a map, its entries in order."""
    from pyspark.sql import functions as F
    from pyspark.sql.types import MapType

    value = F.col(f"`{column.name.replace('`', '``')}`")
    if isinstance(column.dataType, MapType):
        value, inner = F.array_sort(F.map_entries(value)), column.dataType.valueType
    else:
        inner = column.dataType
    if "map<" in inner.simpleString():
        raise BadData(
            f"Column {column.name!r} is {column.dataType.simpleString()}: a map within another type has no hash in "
            "Spark. Write it as text: F.to_json(column).",
            column=column.name,
        )
    return value
