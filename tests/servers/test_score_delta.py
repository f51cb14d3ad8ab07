"""Scoring into a Delta table: a part is a transaction, and one that was committed without a record is found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pyspark.sql import functions as F

import clusters
import tritium as tr
from broker import jars
from tritium.errors import BadSetting, DataChanged, ScoringFailed
from tritium.ml import TorchModel
from tritium.model.signature import Input, Output, Signature
from tritium.predict.ledger import Ledger

SIGNATURE = Signature((Input("x", ("a",), "float32", (1,)),), (Output("y", shape=(1,)),), "regression")
CODE = """
import sys
sys.path[:0] = {path!r}
import test_score_delta
test_score_delta.walk({place!r}, {conf!r})
"""


def table(spark: Any, *, bad: int = -1, other: int = -1) -> Any:
    a = F.when(F.col("id") != bad, F.col("id").cast("double"))
    return spark.range(0, 600, 1, 6).select("id", a.alias("a"), F.when(F.col("id") == other, "another").alias("text"))


def rows(df: Any) -> list[str]:
    return sorted(map(repr, df.collect()))


def walk(place: str, conf: dict[str, str]) -> None:
    """Score into Delta in a process of its own, as its session needs Delta's jars."""
    clusters.COMMON.update(conf)
    with clusters.session("local") as spark:
        torch.manual_seed(0)
        model = TorchModel(tr.Model(torch.nn.Linear(1, 1), SIGNATURE))
        by_path(spark, model, place)
        by_name(spark, model, place)
    Path(place, "done").touch()


def by_path(spark: Any, model: TorchModel, place: str) -> None:
    settings: dict[str, Any] = {"into": f"delta:{place}/scored", "resume": f"{place}/resume", "verbose": False}

    def written() -> list[str]:
        return rows(spark.read.format("delta").load(f"{place}/scored"))

    with pytest.raises(ScoringFailed) as caught:
        model.score(table(spark, bad=590), **settings)
    assert len(written()) == 100 * sum(part.count for part in Ledger(f"{place}/resume").parts() if part.fingerprint)
    done = model.score(table(spark), **settings)
    assert done.kept == caught.value.finished >= 1
    assert written() == rows(model.transform(table(spark)))

    # Its record was not written any more: the part is found by the history of the table, and not written twice.
    ledger = Ledger(f"{place}/resume")
    part = ledger.parts()[0]
    part.fingerprint, part.output = None, {}
    ledger.record(part)
    assert model.score(table(spark), **settings).scored == 0
    assert written() == rows(model.transform(table(spark)))

    with pytest.raises(DataChanged, match=r"1 of \d finished parts"):
        model.score(table(spark, other=3), changed="refuse", **settings)
    assert 0 < model.score(table(spark, other=3), **settings).scored < 600
    assert written() == rows(model.transform(table(spark, other=3)))
    with pytest.raises(BadSetting, match=r"can't be written to.*METADATA_MISMATCH"):
        model.score(table(spark).withColumn("more", F.lit(1)), **{**settings, "resume": f"{place}/new"})


def by_name(spark: Any, model: TorchModel, place: str) -> None:
    spark.sql(
        "CREATE TABLE nightly (id LONG, a DOUBLE, text STRING, prediction DOUBLE) "
        f"USING delta LOCATION '{place}/nightly'"
    )
    try:
        for number in range(2):  # Two nights, each with its own record.
            model.score(table(spark), into="nightly", resume=f"{place}/night-{number}", verbose=False)
        assert rows(spark.table("nightly")) == sorted(2 * rows(model.transform(table(spark))))
    finally:
        spark.sql("DROP TABLE nightly")


@pytest.mark.timeout(600)
def test_into_delta(tmp_path: Path) -> None:
    conf = {
        "spark.jars": ",".join(map(str, jars("delta").glob("*.jar"))),
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.databricks.delta.snapshotPartitions": "1",
    }
    code = CODE.format(path=[str(Path(__file__).parent), *sys.path], place=str(tmp_path), conf=conf)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    assert tmp_path.joinpath("done").exists()
