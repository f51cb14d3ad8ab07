"""The exchange on a real Spark: which rank gets which rows, the types, and how often what is computed."""

from __future__ import annotations

import datetime
import decimal
import zlib
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from pyspark.ml.feature import HashingTF
from pyspark.sql import functions as F

import clusters
from tritium.data.exchange import Exchange
from tritium.data.receiver import Receiver
from tritium.data.schema import Data
from tritium.data.spool import Spool
from tritium.data.tables import Tables
from tritium.errors import BadData, BadSetting
from tritium.spark import inside

from .received import receive

UTC = datetime.timezone.utc


def rows_of(ranks: list[dict[str, Any]], name: str = "train", column: str = "k") -> list[Any]:
    return sorted(value for rank in ranks for value in rank["columns"][name].get(column, np.zeros(0)).tolist())


def whole(ranks: list[dict[str, Any]], name: str = "train") -> dict[int, tuple[int, int]]:
    """Return the fingerprint of all ranks together."""
    total: dict[int, tuple[int, int]] = {}
    for rank in ranks:
        for partition, (rows, sums, _) in rank["parts"][name].items():
            before = total.get(partition, (0, 0))
            total[partition] = (before[0] + rows, (before[1] + sums) % 2**64)
    return total


def sources(spark: Any) -> dict[str, tuple[Callable[[], Any], list[int]]]:
    from pyspark.sql import functions as F

    base = spark.range(0, 1000, 1, 7).withColumnRenamed("id", "k")
    other = spark.range(0, 1000, 2, 3).withColumnRenamed("id", "k")
    return {
        "range": (lambda: base, list(range(1000))),
        "limit 0": (lambda: base.limit(0), []),
        "filter false": (lambda: base.where(F.lit(False)), []),
        "empty groupBy": (lambda: base.where("k < 0").groupBy("k").count().select("k"), []),
        "join": (lambda: base.join(other, "k").select("k"), list(range(0, 1000, 2))),
        "groupBy": (lambda: base.groupBy((F.col("k") % 50).alias("k")).count().select("k"), list(range(50))),
        "orderBy": (lambda: base.orderBy(F.desc("k")), list(range(1000))),
        "cached": (lambda: base.cache(), list(range(1000))),
        "self-union": (lambda: base.union(base), sorted([*range(1000), *range(1000)])),
        "one row": (lambda: spark.range(5, 6, 1, 1).withColumnRenamed("id", "k"), [5]),
        "repartition": (lambda: base.repartition(3), list(range(1000))),
    }


@pytest.mark.parametrize(
    "name",
    [
        "range",
        "limit 0",
        "filter false",
        "empty groupBy",
        "join",
        "groupBy",
        "orderBy",
        "cached",
        "self-union",
        "one row",
        "repartition",
    ],
)
@pytest.mark.parametrize("shuffle", ["full", "stream"])
def test_every_rank_starts_and_every_row_arrives_once(spark: Any, name: str, shuffle: Any) -> None:
    make, expected = sources(spark)[name]
    frame = make()
    ranks = receive(Exchange({"train": Data(frame, shuffle=shuffle)}, 3))
    frame.unpersist()
    assert len(ranks) == 3  # the receipt of each proves its one anchor, and that it came last when sorted
    assert rows_of(ranks) == expected
    ids = [i for rank in ranks for i in rank["columns"]["train"]["_id"].tolist()]
    assert len(set(ids)) == len(ids) == len(expected)
    counts = [rank["rows"]["train"] for rank in ranks]
    assert max(counts) - min(counts) <= max(1, len(whole(ranks)))
    for rank, found in enumerate(ranks):
        own = found["columns"]["train"]["_id"]
        assert (((own >> 33) + (own & ((1 << 33) - 1))) % 3 == rank).all()
        if shuffle == "full":
            assert (np.diff(own) > 0).all()


def test_more_ranks_than_rows_and_a_single_rank(spark: Any) -> None:
    frame = spark.range(2).withColumnRenamed("id", "k")
    assert [r["rows"]["train"] for r in receive(Exchange({"train": frame.coalesce(1)}, 1))] == [2]


def test_several_names_and_no_data_at_all(spark: Any) -> None:
    train = spark.range(0, 100, 1, 3).selectExpr("id AS k", "id / 2 AS x")
    other = spark.range(0, 11, 1, 2).selectExpr("cast(id AS string) AS word")
    data = {
        "train": train,
        "validation": Data(other, vocabulary={"word": [str(i) for i in range(11)]}),
        "empty": spark.range(0),
    }
    ranks = receive(Exchange(data, 2))
    assert rows_of(ranks) == list(range(100))
    assert rows_of(ranks, "train", "x") == [k / 2 for k in range(100)]
    assert rows_of(ranks, "validation", "word") == list(range(11))
    assert [rank["rows"]["empty"] for rank in ranks] == [0, 0]
    assert len(receive(Exchange({}, 2, spark=spark))) == 2


def typed_rows(spark: Any) -> Any:
    from pyspark.ml.linalg import Vectors
    from pyspark.mllib.linalg import Vectors as OldVectors
    from pyspark.sql import Row

    day, moment = datetime.date(2020, 2, 29), datetime.datetime(2021, 7, 1, 12, 30, 15, 250000, tzinfo=UTC)
    rows = [
        Row(
            i=i,
            cent=decimal.Decimal("1234567.89") + i,
            day=day + datetime.timedelta(days=i),
            moment=moment,
            flag=i % 2 == 0,
            dense=Vectors.dense([1.0, i, 3.0]) if i % 2 else Vectors.sparse(3, [0, 2], [1.0, 3.0 + i]),
            old=OldVectors.sparse(2, [1], [float(i)]),
            fixed=[0.5, float(i)],
            matrix=[[1.0, 2.0, 3.0], [4.0, 5.0, float(i)]],
            ragged=list(range(i)),
            word="ab"[i % 2],
            words=["a"] * i,
            image=bytes([i]) * i,
            inner=Row(a=i * 10, deep=Row(b=float(i))),
            maybe=None if i == 1 else i,
        )
        for i in range(4)
    ]
    frame = spark.createDataFrame(rows)
    return frame.selectExpr(
        "int(i) AS i", "tinyint(i) AS i8", "smallint(i) AS i16", "bigint(i) AS i64", "float(i) / 2 AS half",
        "float(i) AS f32", "double(i) AS f64", "cast(cent AS decimal(12,2)) AS cent", "day", "moment",
        "timestamp_ntz'1970-01-02 03:04:05.000006' AS wall", "flag", "dense", "old", "fixed",
        "cast(matrix AS array<array<float>>) AS matrix", "cast(ragged AS array<int>) AS ragged", "word", "words",
        "image", "inner", "maybe", "if(i = 1, null, dense) AS gap",
    )  # fmt: skip


@pytest.mark.parametrize("cluster", ["local", "connect"], indirect=True)
def test_every_type_becomes_the_numbers_that_the_documentation_states(cluster: Any) -> None:
    spark = cluster.spark
    data = Data(
        typed_rows(spark),
        vocabulary={"word": ["b", "a"]},
        hash_buckets={"words": 1000},
        pad={"ragged": (4, -1), "words": 3},
        nulls={"maybe": "mask", "gap": "mask"},
        dtype={"dense": "float32"},
    )
    (rank,) = receive(Exchange({"train": data}, 1))
    got = rank["columns"]["train"]
    order = np.argsort(got["i"])
    i = np.arange(4)

    def check(name: str, expected: Any, dtype: str) -> None:
        found = got[name][order]
        assert found.dtype == dtype, name
        np.testing.assert_array_equal(found, np.asarray(expected), err_msg=name)

    for name, dtype in [("i", "int32"), ("i8", "int8"), ("i16", "int16"), ("i64", "int64")]:
        check(name, i, dtype)
    check("f32", i, "float32")
    check("f64", i, "float64")
    check("half", i / 2, "float64")
    check("cent", [1234567.89, 1234568.89, 1234569.89, 1234570.89], "float64")
    check("day", (np.datetime64("2020-02-29") - np.datetime64("1970-01-01")).astype(int) + i, "int32")
    moment = datetime.datetime(2021, 7, 1, 12, 30, 15, 250000, tzinfo=UTC)
    check("moment", [int(moment.timestamp() * 1_000_000)] * 4, "int64")
    check("wall", [((27 * 60 + 4) * 60 + 5) * 1_000_000 + 6] * 4, "int64")
    check("flag", i % 2 == 0, "bool")
    check("dense", [[1, 0, 3], [1, 1, 3], [1, 0, 5], [1, 3, 3]], "float32")
    check("old", [[0, k] for k in i], "float64")
    check("fixed", [[0.5, k] for k in i], "float64")
    check("matrix", [[[1, 2, 3], [4, 5, k]] for k in i], "float32")
    check("ragged", [[-1] * 4, [0, -1, -1, -1], [0, 1, -1, -1], [0, 1, 2, -1]], "int32")
    check("word", [1, 0, 1, 0], "int64")
    a = zlib.crc32(b"a") % 1000
    check("words", [[0, 0, 0], [a, 0, 0], [a, a, 0], [a, a, a]], "int64")
    assert [got["image"][row] for row in order] == [bytes([k]) * k for k in i]
    check("inner.a", i * 10, "int64")
    check("inner.deep.b", i, "float64")
    check("maybe", [0, 0, 2, 3], "int64")
    check("maybe_mask", [True, False, True, True], "bool")
    check("gap", [[1, 0, 3], [0, 0, 0], [1, 0, 5], [1, 3, 3]], "float64")
    check("gap_mask", [[True] * 3, [False] * 3, [True] * 3, [True] * 3], "bool")


def test_rows_with_equal_values_go_to_one_rank_and_those_of_other_names_are_dealt_evenly(spark: Any) -> None:
    rows = spark.range(0, 600, 1, 4).selectExpr("id as i", "named_struct('k', cast(id * 7 % 40 as int)) as s")
    data = {"train": Data(rows, columns=["i", "s"], together="s.k"), "test": spark.range(0, 90, 1, 2)}
    with Exchange(data, 3).persist() as exchange:
        found = receive(exchange)
    keys = [set(rank["columns"]["train"]["s.k"].tolist()) for rank in found]
    assert sum(map(len, keys)) == len(set.union(*keys)) == 40, "no key is on two ranks"
    assert min(map(len, keys)) > 4
    assert sorted(np.concatenate([rank["columns"]["train"]["i"] for rank in found]).tolist()) == list(range(600))
    assert [rank["rows"]["test"] for rank in found] == [30, 30, 30]


def test_the_twin_without_a_jvm_gives_the_same_rows(spark: Any) -> None:
    frame = typed_rows(spark).drop("dense", "old", "gap").coalesce(1)
    settings: dict[str, Any] = {
        "vocabulary": {"word": ["b", "a"]},
        "hash_buckets": {"words": 1000},
        "pad": {"ragged": (4, -1), "words": 3},
        "nulls": {"maybe": "mask"},
        "dtype": {"fixed": "float32"},
    }
    tables = Tables({"train": Data(frame.toArrow(), **settings)}, 2)
    exchange = Exchange({"train": Data(frame, **settings)}, 2)
    assert tables.plan == exchange.plan
    for rank, expected in enumerate(receive(exchange)):
        with closing(Spool(tables.plan["train"])) as spool:
            receiver = Receiver(tables.plan, {"train": spool}, sorted=True)
            for batch in tables.batches(rank):
                receiver.take(batch)
            assert receiver.finish(confirmed=False).fingerprint == expected["parts"]


def test_scalars_of_every_kind_pack_to_one_row(spark: Any) -> None:
    names = ["i8", "flag", "cent", "day", "moment", "wall", "inner.a", "maybe"]
    data = Data(typed_rows(spark), columns={"x": names, "i": "i"}, dtype={"x": "float64"}, nulls={"maybe": -1})
    (rank,) = receive(Exchange({"train": data}, 1))
    got = rank["columns"]["train"]
    moment = datetime.datetime(2021, 7, 1, 12, 30, 15, 250000, tzinfo=UTC).timestamp() * 1e6
    wall = ((27 * 60 + 4) * 60 + 5) * 1e6 + 6
    expected = [
        [k, k % 2 == 0, float(f"{1234567 + k}.89"), 18321 + k, moment, wall, k * 10, -1 if k == 1 else k]
        for k in range(4)
    ]
    np.testing.assert_array_equal(got["x"][np.argsort(got["i"])], expected)


def test_names_with_dots_and_backticks(spark: Any) -> None:
    frame = spark.range(3).selectExpr("id AS `a.b`", "id + 1 AS `odd``name`", "named_struct('x.y', id) AS s")
    (rank,) = receive(Exchange({"train": frame}, 1))
    got = rank["columns"]["train"]
    assert sorted(got["a.b"].tolist()) == sorted(got["s.x.y"].tolist()) == [0, 1, 2]
    assert sorted(got["odd`name"].tolist()) == [1, 2, 3]


TIMES = {"columns": {"x": ["b", "a"]}, "default_dtype": "float32"}
WHOLE = {"columns": {"x": ["b", "a"]}, "dtype": {"x": "int64"}}


@pytest.mark.parametrize(
    ("columns", "options", "text", "column"),
    [
        ("if(id = 7, null, id) AS x", {}, "null", "x"),
        ("if(id = 7, null, id) AS a, id AS b", {"columns": {"x": ["b", "a"]}}, "null", "a"),
        ("if(id = 7, double('NaN'), id) AS a, id AS b", {"columns": {"x": ["b", "a"]}, "dtype": "float32"}, "NaN", "a"),
        (
            "if(id = 7, 1e300D, id) AS a, id AS b",
            {"columns": {"x": ["b", "a"]}, "dtype": "float32"},
            "beyond float32",
            "a",
        ),
        ("if(id = 7, 1700000001, id) AS a, 1D AS b", TIMES, "about 1,700,000,000, an integer beyond 16,777,215", "a"),
        ("if(id = 7, double('NaN'), id) AS a, id AS b", WHOLE, "NaN, infinite or beyond int64", "a"),
        ("if(id = 7, -1e300D, id) AS a, id AS b", WHOLE, "NaN, infinite or beyond int64", "a"),
        ("array(if(id = 7, 1e300D, id)) AS x", {"dtype": "float32", "nan": "keep"}, "1e+300, beyond float32", "x"),
        ("sequence(0, if(id = 7, 3, 1)) AS x", {}, "pad={'x': 4}", "x"),
        ("if(id = 7, 'new', 'old') AS x", {"vocabulary": {"x": ["old"]}}, "'new'", "x"),
    ],
)
def test_what_only_the_data_shows_names_column_row_and_value(
    spark: Any, columns: str, options: Any, text: str, column: str
) -> None:
    frame = spark.range(0, 20, 1, 2).selectExpr(*_split(columns))
    with pytest.raises(Exception, match="BadRow") as caught:
        receive(Exchange({"train": Data(frame, **options)}, 2))
    message = str(caught.value)
    assert text in message
    assert f"column '{column}'" in message
    assert "in row 7 of source partition 0" in message


def test_a_wide_sparse_vector_is_refused_and_both_ways_out_work(spark: Any) -> None:
    words = spark.range(0, 9, 1, 1).selectExpr("id", "IF(id = 7, array('a', 'b'), array()) AS words")
    wide = HashingTF(inputCol="words", outputCol="v").transform(words)
    with pytest.raises(Exception, match="BadRow") as caught:
        receive(Exchange({"train": Data(wide, ["v"], dtype="float32")}, 1))
    message = str(caught.value)
    assert "column 'v' is a sparse vector of 262,144 numbers, 0 of them set" in message
    assert "1,048,576 bytes, more than 262,144, in row 0 of" in message
    assert "F.unwrap_udt('v')['indices']" in message

    narrow = HashingTF(inputCol="words", outputCol="v", numFeatures=4096).transform(words)
    (rank,) = receive(Exchange({"train": Data(narrow, ["v"], dtype="float32")}, 1))
    assert rank["columns"]["train"]["v"].sum(axis=1).tolist() == [0] * 7 + [2, 0]

    places = wide.select(F.transform(F.unwrap_udt("v")["indices"], lambda place: place + 1).alias("words"))
    (rank,) = receive(Exchange({"train": Data(places, pad={"words": 3})}, 1))
    bag = torch.nn.EmbeddingBag(262_144 + 1, 2, mode="sum", padding_idx=0)
    assert (bag(torch.from_numpy(rank["columns"]["train"]["words"])) != 0).any(1).tolist() == [False] * 7 + [
        True,
        False,
    ]


def test_floats_packed_with_integers_keep_every_digit(spark: Any) -> None:
    frame = spark.sql("SELECT 2BD + 9007199254740991L AS a, 3.7D AS b, 9223372036854775807L AS c")
    data = Data(frame, columns={"x": ["a", "b", "c"]}, dtype={"x": "int64"})
    (rank,) = receive(Exchange({"train": data}, 1))
    assert rank["columns"]["train"]["x"].tolist() == [[2**53 + 1, 3, 2**63 - 1]]


def _split(columns: str) -> list[str]:
    parts = columns.split(" AS ")
    names = [part.partition(",")[0] for part in parts[1:]]
    bodies = [parts[0], *(part.partition(", ")[2] for part in parts[1:-1])]
    return [f"{body} AS {name}" for body, name in zip(bodies, names, strict=True)]


def test_persist_computes_the_source_once_and_unpersist_always_happens(spark: Any) -> None:
    count = spark.sparkContext.accumulator(0)

    def counted(batches: Any) -> Any:
        for batch in batches:
            count.add(batch.num_rows)
            yield batch

    source = spark.range(0, 100, 1, 4).mapInArrow(counted, "id long")
    with Exchange({"train": Data(source, columns={"k": "id"})}, 2).persist() as exchange:
        first = receive(exchange)
        assert whole(receive(exchange)) == whole(first)
        assert rows_of(first) == list(range(100))
        assert exchange.frame.storageLevel.useMemory
    assert count.value == 100
    assert not exchange.frame.storageLevel.useMemory
    with pytest.raises(ZeroDivisionError), Exchange({"train": source}, 2).persist() as exchange:
        raise ZeroDivisionError
    assert not exchange.persisted
    assert not exchange.frame.storageLevel.useMemory


def test_the_fingerprint_is_the_same_for_each_evaluation_and_either_delivery(spark: Any) -> None:
    from pyspark.sql import functions as F

    frame = spark.range(0, 5000, 1, 5).select(F.col("id").alias("k"), (F.col("id") * 0.5).alias("x"))
    first = whole(receive(Exchange({"train": frame}, 3)))
    assert sum(rows for rows, _ in first.values()) == 5000
    assert whole(receive(Exchange({"train": frame}, 2))) == first
    assert whole(receive(Exchange({"train": Data(frame, shuffle="stream")}, 3))) == first
    changed = frame.withColumn("x", F.when(F.col("k") == 1234, 1.0).otherwise(F.col("x")))
    other = whole(receive(Exchange({"train": changed}, 3)))
    assert {part: rows for part, (rows, _) in other.items()} == {part: rows for part, (rows, _) in first.items()}
    assert [part for part in first if other[part] != first[part]] == [1]


def test_a_join_upstream_keeps_the_counts_and_the_fingerprint_tells_whether_the_rows_moved(spark: Any) -> None:
    from pyspark.sql import functions as F

    left = spark.range(0, 3000, 1, 3).select((F.col("id") % 997).alias("key"), F.col("id").alias("k"))
    right = spark.range(0, 997, 1, 2).select(F.col("id").alias("key"), F.rand(7).alias("x"))
    exchange = Exchange({"train": left.join(right.hint("shuffle_hash"), "key").select("k", "x")}, 2)
    runs = [receive(exchange), receive(exchange)]
    assert rows_of(runs[0]) == rows_of(runs[1]) == list(range(3000))
    counts = [{part: rows for part, (rows, _) in whole(run).items()} for run in runs]
    assert counts[0] == counts[1]
    by_id = [
        dict(zip(rank["columns"]["train"]["_id"].tolist(), rank["columns"]["train"]["k"].tolist(), strict=True))
        for run in runs
        for rank in [_together(run)]
    ]
    assert (by_id[0] == by_id[1]) == (whole(runs[0]) == whole(runs[1]))


def _together(run: list[dict[str, Any]]) -> dict[str, Any]:
    names = run[0]["columns"]["train"]
    joined = {name: np.concatenate([rank["columns"]["train"][name] for rank in run]) for name in names}
    return {"columns": {"train": joined}}


@pytest.mark.parametrize("shuffle", ["stream", "full"])
def test_the_end_of_an_unsorted_stream_is_seen_in_the_worker_protocol(spark: Any, shuffle: str) -> None:
    exchange = Exchange({"train": Data(spark.range(1000), shuffle=shuffle)}, 2)
    if exchange.sorted:
        pytest.skip("this version of Spark is not among TRIED in spark/inside/end_of_stream.py")
    assert [rank["peeked"] for rank in receive(exchange)] == [True, True]


def test_without_the_workers_protocol_sorted_rows_prove_the_end(spark: Any) -> None:
    tried = receive(Exchange({"train": spark.range(0, 5000, 1, 7)}, 2))
    with clusters.set_to(spark, **{inside.SETTING: "-end_of_stream"}):
        exchange = Exchange({"train": spark.range(0, 5000, 1, 7)}, 2)
        assert exchange.sorted
        found = receive(exchange)  # IncompleteShard where the anchor does not come last, or ids fall
    for rank, before in zip(found, tried, strict=True):
        ids = rank["columns"]["train"]["_id"]
        assert (np.diff(ids) > 0).all()
        assert sorted(before["columns"]["train"]["_id"].tolist()) == ids.tolist()


def test_frames_that_cannot_be_exchanged(spark: Any) -> None:
    import pandas as pd

    frame = spark.range(3)
    with pytest.raises(BadData, match=r"pandas.*on=\"driver\""):
        Exchange({"train": pd.DataFrame({"a": [1]})}, 2)
    with pytest.raises(BadData, match="streaming DataFrame"):
        Exchange({"train": spark.readStream.format("rate").load()}, 2)
    with pytest.raises(BadSetting, match="ranks=0"):
        Exchange({"train": frame}, 0)
    with pytest.raises(BadSetting, match="identifier"):
        Exchange({"_id": frame}, 2)
    with pytest.raises(BadData, match="Did you mean 'id'"):
        Exchange({"train": Data(frame, columns={"x": "ids"})}, 2)
