"""Scoring into a table: the rows are those of `transform`, and what is finished is not computed again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyspark.sql import functions as F
from torch import nn

import clusters
import tritium as tr
from tritium.errors import BadData, BadSetting, DataChanged, ScoringFailed
from tritium.ml import TorchModel
from tritium.model.signature import Input, Output, Signature
from tritium.predict.ledger import Ledger
from tritium.spark.inside import SETTING

SIGNATURE = Signature((Input("x", ("a", "b"), "float32", (2,)),), (Output("y", shape=(1,)),), "regression")
PARTITIONS = 9


class Counting(nn.Module):
    """A model that writes down how many rows it was called with."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        self.line = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with open(os.path.join(self.place, str(os.getpid())), "a") as file:
            file.write(f"{len(x)}\n")
        return self.line(x)


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory) -> str:
    # It stays until pytest ends: a worker of a task that Spark has ended still writes there when the test is over.
    return str(tmp_path_factory.mktemp("place"))


@pytest.fixture
def model(place: str) -> TorchModel:
    return TorchModel(tr.Model(Counting(place), SIGNATURE), batch_size=16)


def scored_rows(place: str) -> int:
    """Return how many rows were scored since the last call."""
    count = 0
    for file in Path(place).iterdir():
        count += sum(map(int, file.read_text().split()))
        file.unlink()
    return count


def table(spark: Any, rows: int = 900, *, bad: int = -1, other: int = -1) -> Any:
    """Return rows in PARTITIONS partitions: one `bad` has a null, and one has an `other` text than it should."""
    return spark.range(0, rows, 1, PARTITIONS).select(
        "id",
        F.when(F.col("id") != bad, F.sin("id")).alias("a"),
        (F.col("id") % 7).cast("int").alias("b"),
        F.when(F.col("id") == other, "another").otherwise(F.concat(F.lit("text "), "id")).alias("text"),
    )


def same_rows(one: Any, other: Any) -> bool:
    return bool(one.schema.simpleString() == other.schema.simpleString()) and sorted(
        map(repr, one.collect())
    ) == sorted(map(repr, other.collect()))


def score(model: TorchModel, df: Any, tmp_path: Path, **settings: Any) -> Any:
    settings = {"into": f"parquet:{tmp_path}/scored", "resume": f"{tmp_path}/resume", "verbose": False, **settings}
    return model.score(df, **settings)


@pytest.mark.parametrize("seed", range(3))
def test_the_rows_are_those_of_transform(spark: Any, model: TorchModel, tmp_path: Path, seed: int) -> None:
    draw = np.random.default_rng(seed)
    df = table(spark, int(draw.integers(1, 400))).withColumns(
        {
            "map": F.create_map(F.col("text"), F.col("b")),
            "list": F.array("a", F.lit(None), F.lit(float("nan"))),
            "inner.struct": F.struct(F.lit(None).cast("date").alias("day"), F.col("id").cast("decimal(20,3)")),
            "bytes": F.col("text").cast("binary"),
            "when": F.timestamp_seconds(F.col("id") * 1e5),
        }
    )
    if seed == 1:  # Behind a shuffle, with partitions that Spark chooses while it runs.
        df = df.groupBy("b").agg(F.max("a").alias("a"), F.collect_list("id").alias("ids"))
    if seed == 2:
        df.write.parquet(f"{tmp_path}/source")
        df = spark.read.parquet(f"{tmp_path}/source").where("id % 3 > 0")
    done = score(model, df, tmp_path)
    written = spark.read.parquet(f"{tmp_path}/scored")
    assert same_rows(written, model.transform(df))
    assert done.rows == done.scored == df.count()
    assert Path(tmp_path, "scored", "_SUCCESS").exists()
    assert not list(Path(tmp_path, "scored").glob("_tritium*"))
    again = score(model, df, tmp_path)
    assert (again.rows, again.scored, again.kept) == (done.rows, 0, done.parts)


def test_an_error_in_a_late_row_keeps_the_parts_before_it(
    spark: Any, model: TorchModel, place: str, tmp_path: Path
) -> None:
    with pytest.raises(ScoringFailed, match=r"column 'a' is null.*finished and kept.*on_error=") as caught:
        score(model, table(spark, bad=880), tmp_path)
    assert caught.value.finished >= 2
    assert caught.value.last == PARTITIONS - 1
    assert not list(Path(tmp_path, "scored").glob("*.parquet")), "readers see nothing before all is there"
    scored_rows(place)
    done = score(model, table(spark), tmp_path)
    assert done.rows == 900
    assert done.kept == caught.value.finished
    assert 0 < scored_rows(place) == done.scored <= 900 - 100 * caught.value.finished
    assert same_rows(spark.read.parquet(f"{tmp_path}/scored"), model.transform(table(spark)))


@pytest.mark.parametrize("on_error", ["skip", "column"])
def test_after_an_error_the_rows_may_be_treated_otherwise(
    spark: Any, model: TorchModel, tmp_path: Path, on_error: str
) -> None:
    df = table(spark, bad=880)
    with pytest.raises(ScoringFailed, match="null"):
        score(model, df, tmp_path)
    if on_error == "column":  # The finished parts lack the column.
        with pytest.raises(BadSetting, match=r"columns of the result.*prediction_error"):
            score(model, df, tmp_path, on_error=on_error)
        return
    assert score(model, df, tmp_path, on_error=on_error).kept >= 2
    written = spark.read.parquet(f"{tmp_path}/scored")
    assert same_rows(written, model.copy().setParams(on_error=on_error).transform(df))
    assert score(model, df, tmp_path, on_error=on_error).scored == 0
    with pytest.raises(BadSetting, match="on_error: 'fail', was"):
        score(model, df, tmp_path)


def test_only_a_part_whose_rows_have_changed_is_computed_again(
    spark: Any, model: TorchModel, place: str, tmp_path: Path
) -> None:
    score(model, table(spark), tmp_path)
    scored_rows(place)
    changed = table(spark, other=150)
    with pytest.raises(DataChanged, match=r"1 of \d finished parts.*partitions? .*200 rows, others"):
        score(model, changed, tmp_path, changed="refuse")
    assert scored_rows(place) == 0
    done = score(model, changed, tmp_path)
    assert done.rows == 900
    assert 0 < scored_rows(place) == done.scored <= 200
    assert same_rows(spark.read.parquet(f"{tmp_path}/scored"), model.transform(changed))
    fewer = table(spark).where("id >= 200")
    assert score(model, fewer, tmp_path).scored == 0, "what is not there any more is removed"
    assert same_rows(spark.read.parquet(f"{tmp_path}/scored"), model.transform(fewer))


def test_parts_that_have_moved_in_the_source_stay_known(spark: Any, model: TorchModel, tmp_path: Path) -> None:
    score(model, table(spark), tmp_path)
    others = table(spark).where("id < 100").withColumn("id", F.col("id") + 5000)
    moved = others.union(table(spark))  # Each partition comes PARTITIONS later.
    assert score(model, moved, tmp_path).scored == 100
    assert score(model, moved, tmp_path).scored == 0
    assert score(model, others, tmp_path).scored == 0
    assert same_rows(spark.read.parquet(f"{tmp_path}/scored"), model.transform(others))


def test_a_file_that_is_gone_from_the_target_is_written_again(spark: Any, model: TorchModel, tmp_path: Path) -> None:
    score(model, table(spark), tmp_path)
    next(Path(tmp_path, "scored").glob("part-00004-*.parquet")).unlink()
    assert 0 < score(model, table(spark), tmp_path).scored < 900
    assert same_rows(spark.read.parquet(f"{tmp_path}/scored"), model.transform(table(spark)))


def test_another_scoring_is_refused_by_name(spark: Any, model: TorchModel, place: str, tmp_path: Path) -> None:
    score(model, table(spark), tmp_path)
    for other, df, settings, name in (
        (TorchModel(tr.Model(Counting(place), SIGNATURE)), table(spark), {}, "weights of the model"),
        (model.copy().setParams(prediction_col="p"), table(spark), {}, "columns of the result"),
        (model, table(spark).drop("text"), {}, "columns of the source"),
        (model, table(spark), {"into": f"parquet:{tmp_path}/elsewhere"}, "into"),
        (model.copy().setParams(device="cuda"), table(spark), {}, "device"),
    ):
        with pytest.raises(BadSetting, match=name):
            score(other, df, tmp_path, **settings)
    with pytest.raises(BadSetting, match="is not empty"):
        score(model, table(spark), tmp_path, resume=f"{tmp_path}/new")


def test_two_at_once_are_refused(spark: Any, model: TorchModel, tmp_path: Path) -> None:
    ledger = Ledger(f"{tmp_path}/resume")
    with ledger.locked(), pytest.raises(BadSetting, match=rf"in use by another scoring \(.*pid {os.getpid()}\)"):
        score(model, table(spark), tmp_path)
    assert score(model, table(spark), tmp_path).rows == 900


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"into": "s3://bucket/rows"}, "neither 'parquet:PATH'"),
        ({"into": "parquet:"}, "neither"),
        ({"into": "parquet:/proc/version/rows"}, "can't be written to"),
        ({"into": "delta:/tmp/rows"}, "can't be written to.*delta"),
        ({"changed": "ignore"}, "changed='ignore'"),
        ({"on_error": "keep"}, "on_error='keep'"),
        ({"resume": "/proc/version/ledger"}, "resume='/proc/version/ledger' can't be made"),
        ({"resume": None, "dedupe": True}, "dedupe=True"),
    ],
)
def test_wrong_settings(spark: Any, model: TorchModel, tmp_path: Path, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(BadSetting, match=says):
        score(model, table(spark), tmp_path, **settings)


def test_what_it_can_not_score(spark: Any, model: TorchModel, tmp_path: Path) -> None:
    stream = spark.readStream.format("rate").load().selectExpr("value * 0.1 a", "value b")
    with pytest.raises(BadSetting, match="takes a batch"):
        score(model, stream, tmp_path)
    with pytest.raises(BadData, match="got a DataFrame"):
        score(model, table(spark).toPandas(), tmp_path)
    with clusters.set_to(spark, **{SETTING: "-partitions"}), pytest.raises(BadSetting, match="-partitions"):
        score(model, table(spark), tmp_path)


def test_without_resume_nothing_is_kept(spark: Any, model: TorchModel, tmp_path: Path) -> None:
    assert score(model, table(spark), tmp_path, resume=None).scored == 900
    assert os.listdir(tmp_path) == ["scored"]


def test_equal_inputs_are_scored_once(spark: Any, model: TorchModel, place: str, tmp_path: Path) -> None:
    df = table(spark).withColumn("a", F.when(F.col("id") % 5 > 0, (F.col("id") % 3).cast("double")))
    different = df.select("a", "b").distinct().count()
    done = score(model, df, tmp_path, dedupe=True, on_error="null")
    assert scored_rows(place) <= different == done.scored  # Rows with a null are not for the model.
    plain = model.copy().setParams(on_error="null").transform(df)
    written = spark.read.parquet(f"{tmp_path}/scored")
    order = ["id", "text"]
    np.testing.assert_allclose(
        *(frame.orderBy(order).toPandas().prediction.to_numpy() for frame in (written, plain)), rtol=1e-6
    )
    assert same_rows(written.drop("prediction"), df)
    scored_rows(place)
    assert score(model, df, tmp_path, dedupe=True, on_error="null").scored == scored_rows(place) == 0


def test_a_table_of_the_catalog(spark: Any, model: TorchModel, place: str, tmp_path: Path) -> None:
    spark.sql(f"CREATE DATABASE overnight LOCATION '{tmp_path}/warehouse'")
    try:
        score(model, table(spark), tmp_path, into="overnight.scored")
        assert same_rows(spark.table("overnight.scored"), model.transform(table(spark)))
        scored_rows(place)
        assert score(model, table(spark, other=3), tmp_path, into="overnight.scored").scored < 900
        assert same_rows(spark.table("overnight.scored"), model.transform(table(spark, other=3)))
        with pytest.raises(BadSetting, match="there is such a table already"):
            score(model, table(spark), tmp_path, into="overnight.scored", resume=f"{tmp_path}/new")
        spark.sql("CREATE TABLE overnight.text (id STRING) USING csv")
        with pytest.raises(BadSetting, match="a table of csv"):
            score(model, table(spark), tmp_path, into="overnight.text", resume=f"{tmp_path}/new")
    finally:
        spark.sql("DROP DATABASE overnight CASCADE")


def test_a_limit_does_not_score_the_rest(spark: Any, model: TorchModel, place: str, tmp_path: Path) -> None:
    # The worker goes on with the batches that it was sent until Spark ends the task: 100,000 rows on a busy machine.
    most = 300_000
    df = spark.range(0, 1_600_000, 1, 4).select("id", F.sin("id").alias("a"), F.col("id").cast("int").alias("b"))
    assert len(model.transform(df).limit(5).collect()) == 5
    assert scored_rows(place) <= most
    model.transform(df).show(5)
    assert scored_rows(place) <= most
    df.write.parquet(f"{tmp_path}/rows")
    model.transform(spark.read.parquet(f"{tmp_path}/rows")).show()
    assert scored_rows(place) <= most


@pytest.mark.parametrize("cluster", ["connect"], indirect=True)
def test_spark_connect_is_refused(cluster: Any, tmp_path: Path) -> None:
    linear = TorchModel(tr.Model(nn.Linear(2, 1), SIGNATURE))
    with pytest.raises(BadSetting, match="needs a classic Spark session"):
        score(linear, table(cluster.spark), tmp_path)
