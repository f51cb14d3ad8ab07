"""What older versions of Spark do in place of what they lack gives the same rows and the same numbers."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
import torch
from pyspark.sql import functions as F

import tritium as tr
from tritium.errors import WrongVersion
from tritium.model.signature import Input, Output, Signature
from tritium.predict.spark import score
from tritium.spark.inside import older


@pytest.mark.parametrize("ranks", [1, 3, 40])
def test_a_row_goes_to_the_partition_of_its_number(spark: Any, ranks: int) -> None:
    rows = spark.range(0, 400, 1, 3).select((F.col("id") % ranks).cast("int").alias("rank"))
    for dealt in (older.dealt(rows, ranks, F.col("rank")), older.dealt_by_hash(rows, ranks, F.col("rank"))):
        places = dealt.select("rank", F.spark_partition_id()).distinct().collect()
        assert sorted(map(tuple, places)) == [(rank, rank) for rank in range(ranks)]


ROWS = [
    (1, [1.5, float("nan"), None, -0.0], [[2**60 + 1, None], []], "a", b"\x00", [True, None], True, 2**62 + 1),
    (2, None, None, None, None, None, None, None),
    (3, [float("inf"), 1e-45], [None, [-(2**63)]], "", b"", [], False, -1),
]
TYPES = "i tinyint, x array<float>, y array<array<bigint>>, s string, b binary, t array<boolean>, u boolean, n bigint"


def test_numbers_come_through_pandas_as_they_are(spark: Any) -> None:
    frame = spark.createDataFrame(ROWS, TYPES)
    names = frame.columns

    def as_structs(batches: Any) -> Any:
        for columns in batches:
            rows = [dict(zip(names, row, strict=True)) for row in zip(*(c.to_pylist() for c in columns), strict=True)]
            kind = pa.struct([(name, column.type) for name, column in zip(names, columns, strict=True)])
            yield pa.array([None if row["i"] == 2 else row for row in rows], kind)

    through = older.through_pandas(frame, as_structs, frame.schema, [F.col(name) for name in names])
    taken = frame.select(through.alias("row"))
    assert taken.schema["row"].dataType == frame.schema
    assert [repr(row.row) for row in taken.collect()] == [
        "None" if row.i == 2 else repr(row) for row in frame.collect()
    ]


def test_what_pandas_would_change_is_refused(spark: Any) -> None:
    frame = spark.range(1).select(F.current_timestamp().alias("t"))
    with pytest.raises(WrongVersion, match=r"columns of type timestamp needs Spark 4\.1"):
        older.through_pandas(frame, lambda batches: batches, frame.schema, [F.col("t")])
    with pytest.raises(WrongVersion, match=r"whole rows \(tr.http_transformer\) needs Spark 4\.1"):
        older.through_pandas(frame, lambda batches: batches, frame.schema, [F.struct("t")])


def test_a_launch_and_scores_are_the_same(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = spark.range(0, 20, 1, 3).select("id", F.expr("if(id = 7, null, array(float(id), 1f))").alias("x"))

    def sums() -> tuple[int, float]:
        shard = tr.world().shard("train")
        taken = [batch["x"] for epoch in shard.epochs(1, batch_size=4, shuffle=False) for batch in epoch]
        return shard.rows, float(sum(x.sum() for x in taken))

    outputs = (Output("y", "float32", (1,)), Output("z", "float32", (2,)))
    model = tr.Model(_Two(), Signature((Input("x", ("x",), "float32", (2,)),), outputs))

    def everything() -> tuple[Any, ...]:
        received = tr.launch(sums, data={"train": rows.dropna()}, ranks=2, progress=False)
        scored = {how: score(model, rows, on_error=how).orderBy("id").collect() for how in ("skip", "null", "column")}
        return received, scored

    expected = everything()
    assert [len(rows) for rows in expected[1].values()] == [19, 20, 20]
    monkeypatch.setattr(older, "lacks", lambda spark: True)
    assert everything() == expected


class _Two(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x), torch.sigmoid(x)
