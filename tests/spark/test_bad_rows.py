"""The row of a DataFrame that can't be used, by its key and its place in a file, and what else is missing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.sql import functions as F

import tritium as tr
from tritium.errors import BadRow
from tritium.gang.driver import bad_rows

QUIET: dict[str, Any] = {"ranks": 2, "progress": False, "output": "none", "retries": 0}


def refused(spark: Any, data: dict[str, Any]) -> BadRow:
    with pytest.raises(BadRow) as caught:
        tr.launch(lambda: None, data=data, spark=spark, **QUIET)
    return caught.value


def rows(spark: Any) -> Any:
    k = F.col("id")
    return spark.range(0, 300, 1, 3).select(
        "id",
        F.when(k != 207, k.cast("double")).alias("a"),
        F.when(k % 100 == 1, float("nan")).otherwise(k.cast("double")).alias("b"),
        F.when(k < 290, F.lit("u")).alias("w"),
        (k % 3 == 0).alias("held"),
    )


def test_by_its_key_its_file_and_with_all_columns_that_lack_values(spark: Any, tmp_path: Path) -> None:
    rows(spark).write.parquet(str(tmp_path / "rows"))
    files = spark.read.parquet(str(tmp_path / "rows"))
    data = tr.Data(files, {"a": "a"}, row_key="id")
    error = refused(spark, {"train": data})
    place = re.search(r"is null in the row with id=207 \(file (\S+), row (\d+)\)\.", str(error))
    assert place is not None
    there = spark.read.parquet(place[1]).select("id", "_metadata.row_index").where(F.col("row_index") == int(place[2]))
    assert [row.id for row in there.collect()] == [207]
    data = tr.Data(files, {"x": ["a", "b"], "w": "w"}, vocabulary={"w": ["u"]})
    error = refused(spark, {"first": rows(spark).select("id"), "train": data})
    assert "Of its 300 rows 'a' is null in 1, 'b' is NaN in 3, 'w' is null in 10." in str(error)
    assert re.search(r"is (null|NaN) in file \S+, row \d+\.", str(error))


def test_of_a_text_file_by_its_place_and_with_the_advice_to_name_a_key(spark: Any, tmp_path: Path) -> None:
    rows(spark).coalesce(1).write.csv(str(tmp_path / "rows"), header=True)
    table = spark.read.csv(str(tmp_path / "rows"), header=True, inferSchema=True)
    error = refused(spark, {"train": tr.Data(table, ["a"])})
    assert re.search(r"is null in row 207 of source partition 0, file \S+\.csv, block at byte 0\.", str(error))
    assert "row_key= with a column that differs in every row names the row." in str(error)
    error = refused(spark, {"train": tr.Data(table, ["a"], row_key="id")})
    assert "is null in the row with id=207 (row 207 of source partition 0, file" in str(error)
    assert "names the row" not in str(error)


def test_of_a_half_and_without_files(spark: Any) -> None:
    halves = rows(spark)
    data = {
        name: tr.Data(halves, ["a"], row_key="id", where=("held", held))
        for name, held in (("train", False), ("validation", True))
    }
    error = refused(spark, data)
    assert "data 'validation': column 'a' is null in the row with id=207." in str(error)
    assert error.row_key == {"id": 207}
    assert "Of its 100 rows 'a' is null in 1." in str(error)


def test_a_row_that_spark_puts_elsewhere_is_not_named(spark: Any) -> None:
    """Only the counts hold then, and the place where it was."""
    source = rows(spark).select("a", F.rand().alias("r")).repartition(3, F.col("r"))
    error = refused(spark, {"train": tr.Data(source, ["a"])})
    assert re.search(r"column 'a' is null in row \d+ of source partition \d", str(error))


def test_a_source_that_takes_long_is_left_alone(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bad_rows, "LOOK_SECONDS", 0.0)
    error = refused(spark, {"train": tr.Data(rows(spark), ["a"], row_key="id")})
    assert "row 7 of source partition 2" in str(error)


def test_what_fails_in_its_thread_is_raised_in_the_callers(spark: Any) -> None:
    with pytest.raises(ZeroDivisionError):
        bad_rows._within(bad_rows.LOOK_SECONDS, spark, lambda: bad_rows.Look({}, "", 1 // 0, {}))


def test_what_a_rank_finds_later_is_named_too_also_among_few_rows(spark: Any) -> None:
    def decode(number: int) -> Any:
        if number == 17:
            raise ValueError("a broken picture")
        return np.zeros(2, np.float32)

    def train() -> None:
        for epoch in tr.world().shard("train").epochs(1, batch_size=8):
            for _ in epoch:
                pass

    frame = spark.range(0, 40, 1, 5).withColumn("key", F.concat(F.lit("k"), "id"))
    data = {"other": frame.select("id"), "train": tr.Data(frame, ["id"], decode={"id": decode}, row_key="key")}
    with pytest.raises(BadRow) as caught:
        tr.launch(train, data=data, spark=spark, **QUIET)
    assert "column 'id' of 'train', the row with key='k17', value 17: decode raised ValueError" in str(caught.value)
    assert "on_error" not in str(caught.value), "which leaves out what is found before"
