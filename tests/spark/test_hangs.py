"""DataFrames that Spark 4.2.0 never computes (SPARK-58241) are detected by plan; the pinned Spark computes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tritium.errors import WrongVersion
from tritium.spark.inside import hangs
from tritium.spark.inside.hangs import _in_text, hanging, refuse_hanging


@pytest.fixture
def files(spark: Any, tmp_path: Path) -> str:
    frame = spark.range(0, 100, 1, 1).selectExpr("id", "id * 1.0d as x", "cast(id as string) as s")
    frame.write.parquet(f"{tmp_path}/parquet")
    return f"{tmp_path}/parquet"


def test_a_python_udf_over_parquet_is_refused_on_that_version_alone(
    spark: Any, files: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyspark.sql import functions as F

    decode = F.udf(lambda x: x + 1, "double").asNondeterministic()
    frame = spark.read.parquet(files)
    over_scan = frame.select(decode("x").alias("y"))
    advice = r"UDF '<lambda>' reads the columnar batches of a Scan parquet.*Use Spark 4\.2\.1.*useArrow=False"
    refuse_hanging(over_scan)
    with monkeypatch.context() as patch:
        patch.setattr(hangs, "HANGING", spark.version)
        patch.setattr("tritium.spark.inside._probed", {})
        with pytest.raises(WrongVersion, match=advice):
            refuse_hanging(over_scan)
    assert over_scan.count() == 100

    for columnar in (frame.select(decode(decode("x"))), frame.select(decode("x"), F.col("s")).repartition(2)):
        assert hanging(columnar) is not None
    rows = frame.select(decode(F.col("x") * 2)), frame.filter("x > 3").select(decode("x")), frame.select("x")
    without = F.udf(lambda x: x + 1, "double", useArrow=False)
    for fine in (*rows, frame.repartition(2).select(decode("x")), frame.select(without("x"))):
        assert hanging(fine) is None
    spark.conf.set("spark.sql.execution.pythonUDF.arrow.enabled", "false")
    try:
        assert hanging(frame.select(F.udf(lambda x: x + 1, "double")("x"))) is None
    finally:
        spark.conf.unset("spark.sql.execution.pythonUDF.arrow.enabled")


def test_over_connect_a_plan_is_read_as_text(spark: Any, files: str) -> None:
    from pyspark.sql import functions as F

    frame = spark.read.parquet(files).select(F.udf(lambda x: x + 1, "double")("x").alias("y"))
    plan = frame._jdf.queryExecution().executedPlan().toString()  # as a Connect server would send it
    assert _in_text(plan) == ("'<lambda>'", "FileScan parquet")
    assert _in_text(spark.read.parquet(files)._jdf.queryExecution().executedPlan().toString()) is None
