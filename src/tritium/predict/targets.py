"""Where a scoring that resumes writes its parts: Parquet, Delta, a table of the catalog (driver).

A part appears as a whole or not at all. Parquet's parts are written to a hidden directory in the target, and moved to
their place when all are there; then `_SUCCESS` is made. A part of Delta is one transaction.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from tritium.errors import BadSetting, DataChanged
from tritium.predict.ledger import Part
from tritium.spark.errors import chain, first_line
from tritium.spark.inside.hadoop import Folder

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_FORM = re.compile(r"(delta|parquet):(.+)", re.DOTALL)
_TABLE = re.compile(r"[\w`.-]+")
_TASK = re.compile(r"part-(\d+)-")
_HIDDEN = ("_", ".")


class Target(ABC):
    """The place of a scoring's rows."""

    def __init__(self, spark: Any, into: str) -> None:
        self.spark = spark
        self.into = into

    @abstractmethod
    def refuse_taken(self, schema: Any) -> None:
        """Raise BadSetting where a new scoring of this schema can't be written there."""

    @abstractmethod
    def open(self, run: str, schema: Any) -> None:
        """Make the place ready for the parts of this run, new or continued."""

    @abstractmethod
    def write(self, scored: DataFrame, part: Part) -> dict[str, Any]:
        """Write a part as a whole, by one Spark job, and return what its output is known by."""

    @abstractmethod
    def is_there(self, part: Part) -> bool:
        """Return whether the output of a finished part is still there."""

    @abstractmethod
    def remove(self, parts: Sequence[Part]) -> None:
        """Remove the output of finished parts."""

    def written(self, part: Part) -> tuple[dict[str, Any], DataFrame] | None:
        """Return the output of an unfinished part that was committed all the same, and its rows; None without one.

        What it has left behind else is removed.
        """
        return None

    @abstractmethod
    def close(self, parts: Sequence[Part]) -> None:
        """Let readers see all these parts, and no others."""


class ParquetTarget(Target):
    """A directory that anybody reads as Parquet. Its rows are visible when all are there."""

    def __init__(self, spark: Any, into: str, path: str) -> None:
        super().__init__(spark, into)
        self.path = path
        self._folder = Folder(spark, path)
        self._stage = ""

    def refuse_taken(self, schema: Any) -> None:
        try:
            names = [name for name in self._folder.names() if name == "_SUCCESS" or not name.startswith(_HIDDEN)]
            self._folder.make()
            self._folder.touch("_tritium")  # To see now, not in an hour, whether it can be written to.
            self._folder.delete("_tritium")
        except Exception as error:
            raise BadSetting(
                f"into={self.into!r} can't be written to: {_reason(error)}.", setting="into", path=self.path
            ) from error
        if names:
            raise BadSetting(
                f"into={self.into!r} is not empty: it has {names[0]!r}{' and others' * (len(names) > 1)}. Delete it or "
                "choose another directory; to continue a scoring, give its resume= directory.",
                setting="into",
                path=self.path,
            )

    def open(self, run: str, schema: Any) -> None:
        self._stage = f"_tritium-{run}"
        self._folder.make(self._stage)

    def write(self, scored: DataFrame, part: Part) -> dict[str, Any]:
        name = f"{self._stage}/{part.id}"
        scored.write.parquet(f"{self.path.rstrip('/')}/{name}")
        return {"files": [file for file in self._folder.names(name) if not file.startswith(_HIDDEN)], "at": part.first}

    def is_there(self, part: Part) -> bool:
        staged = set(self._folder.names(f"{self._stage}/{part.id}"))
        return all(file in staged or self._folder.exists(_final(file, part)) for file in part.output["files"])

    def remove(self, parts: Sequence[Part]) -> None:
        self._folder.delete("_SUCCESS")
        for part in parts:
            for file in part.output["files"]:
                self._folder.delete(_final(file, part))
            self._folder.delete(f"{self._stage}/{part.id}")

    def written(self, part: Part) -> None:
        self._folder.delete(f"{self._stage}/{part.id}")

    def close(self, parts: Sequence[Part]) -> None:
        for part in parts:
            staged = f"{self._stage}/{part.id}"
            for file in self._folder.names(staged):
                if file in part.output["files"]:
                    self._folder.move(f"{staged}/{file}", _final(file, part))
        self._folder.delete(self._stage)
        self._folder.touch("_SUCCESS")


class ParquetTable(ParquetTarget):
    """A table of the catalog whose files are Parquet."""

    def __init__(self, spark: Any, name: str) -> None:
        self._name = name
        self._exists = bool(spark.catalog.tableExists(name))
        super().__init__(spark, name, _described(spark, name)["Location"] if self._exists else "/")

    def refuse_taken(self, schema: Any) -> None:
        if self._exists:
            raise BadSetting(
                f"into={self.into!r}: there is such a table already. Drop it or choose another name; to continue a "
                "scoring, give its resume= directory.",
                setting="into",
            )

    def open(self, run: str, schema: Any) -> None:
        if not self._exists:
            self.spark.catalog.createTable(self._name, source="parquet", schema=schema)
            self.path = _described(self.spark, self._name)["Location"]
            self._folder = Folder(self.spark, self.path)
        super().open(run, schema)

    def remove(self, parts: Sequence[Part]) -> None:
        super().remove(parts)
        self.spark.catalog.refreshTable(self._name)

    def close(self, parts: Sequence[Part]) -> None:
        super().close(parts)
        self.spark.catalog.refreshTable(self._name)


class DeltaTarget(Target):
    """A Delta table, by path or by name. Each part is a transaction of its own, which readers see at once."""

    def __init__(self, spark: Any, into: str, path: str | None) -> None:
        super().__init__(spark, into)
        self._path = path
        self._sql_name = into if path is None else f"delta.`{path}`"
        self._run = ""
        self._schema: Any = None

    def refuse_taken(self, schema: Any) -> None:
        """Make the table, or try whether rows of this schema can be added: parts that were the first would conflict."""
        try:
            self._append(self.spark.createDataFrame([], schema))
        except Exception as error:
            raise BadSetting(f"into={self.into!r} can't be written to: {_reason(error)}.", setting="into") from error

    def open(self, run: str, schema: Any) -> None:
        self._run, self._schema = run, schema

    def write(self, scored: DataFrame, part: Part) -> dict[str, Any]:
        self._append(scored, self._mark(part))
        return {"mark": self._mark(part)}

    def is_there(self, part: Part) -> bool:
        return not self._is_new()  # Whoever deletes rows of a table means it.

    def remove(self, parts: Sequence[Part]) -> None:
        """Write the table again without these parts' files, in one transaction: Delta can't delete by file."""
        files = [file for part in parts for file in self._files(part.output["mark"])]
        if files:
            from pyspark.sql import functions as F

            if lost := set(files) - _base_names(self._read().inputFiles()):
                raise DataChanged(
                    f"The parts to replace can't be told from others any more: {len(lost)} of their {len(files)} files "
                    f"in {self.into!r} were rewritten since, by OPTIMIZE or an earlier replacement. Score into a new "
                    "table with a new resume= directory."
                )
            rest = self._read().where(~F.col("_metadata.file_name").isin(files))
            self._save(rest.write.format("delta").mode("overwrite").option("userMetadata", f"tritium-{self._run}"))

    def written(self, part: Part) -> tuple[dict[str, Any], DataFrame] | None:
        mark = self._mark(part)
        # The JVM of a killed driver may live a while and commit. After this commit of nothing, its own is a conflict.
        self._append(self.spark.createDataFrame([], self._schema), mark)
        files = self._files(mark)
        if not files:
            return None
        from pyspark.sql import functions as F

        return {"mark": mark}, self._read().where(F.col("_metadata.file_name").isin(files))

    def close(self, parts: Sequence[Part]) -> None:
        """Do nothing: they are seen already."""

    def _mark(self, part: Part) -> str:
        return f"tritium-{self._run}-{part.id}"

    def _files(self, mark: str) -> list[str]:
        """Return the names of the files that the commit with this mark has added."""
        if self._is_new():
            return []
        history = self.spark.sql(f"DESCRIBE HISTORY {self._sql_name}")
        versions = [row.version for row in history.where(history.userMetadata == mark).select("version").collect()]
        names: set[str] = set()
        for version in versions:
            before = self._read(version - 1).inputFiles() if version > 0 else []
            names.update(_base_names(self._read(version).inputFiles()) - _base_names(before))
        return sorted(names)

    def _append(self, rows: DataFrame, mark: str = "") -> None:
        """Commit rows. Delta ignores a second commit with the same mark."""
        # Not one id for all parts: its versions would have to grow in the order of the commits.
        options = {"txnAppId": mark, "txnVersion": "1", "userMetadata": mark} if mark else {}
        self._save(rows.write.format("delta").mode("append").options(**options))

    def _is_new(self) -> bool:
        if self._path is None:
            return not self.spark.catalog.tableExists(self.into)
        return not Folder(self.spark, self._path).exists("_delta_log")

    def _read(self, version: int | None = None) -> DataFrame:
        reader = self.spark.read.format("delta")
        reader = reader if version is None else reader.option("versionAsOf", version)
        frame: DataFrame = reader.table(self.into) if self._path is None else reader.load(self._path)
        return frame

    def _save(self, writer: Any) -> None:
        if self._path is None:
            writer.saveAsTable(self.into)
        else:
            writer.save(self._path)


def target_of(spark: Any, into: str) -> Target:
    """Return the target that `into` names. Raises BadSetting for any other text."""
    text = str(into)
    if match := _FORM.fullmatch(text):
        kind, path = match.groups()
        return DeltaTarget(spark, text, path) if kind == "delta" else ParquetTarget(spark, text, path)
    if not _TABLE.fullmatch(text):
        raise BadSetting(
            f"into={into!r} is neither 'parquet:PATH', nor 'delta:PATH', nor the name of a table.", setting="into"
        )
    exists = spark.catalog.tableExists(text)
    provider = _described(spark, text)["Provider"] if exists else str(spark.conf.get("spark.sql.sources.default"))
    if provider.lower() == "delta":
        return DeltaTarget(spark, text, None)
    if provider.lower() == "parquet":
        return ParquetTable(spark, text)
    raise BadSetting(
        f"into={into!r}: a table of {provider} can't be written part by part. Use a table of Delta or Parquet.",
        setting="into",
    )


def _reason(error: Exception) -> str:
    head = chain(error)[0]
    return first_line(head.message or head.type).rstrip(".")


def _final(file: str, part: Part) -> str:
    """Return the name of a part's file in the target: numbered by the source partition, not by the job's task.

    It stays when the partitions move in the source.
    """
    return _TASK.sub(lambda match: f"part-{part.output['at'] + int(match[1]):05d}-", file, count=1)


def _described(spark: Any, name: str) -> dict[str, str]:
    return {row.col_name: row.data_type for row in spark.sql(f"DESCRIBE TABLE EXTENDED {name}").collect()}


def _base_names(urls: Collection[str]) -> set[str]:
    return {url.rpartition("/")[2] for url in urls}
