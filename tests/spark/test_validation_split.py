"""The rows of a DataFrame to train and to validate on, as ranks receive them: each once, drawn alone, dealt evenly."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from pyspark.ml.functions import array_to_vector
from pyspark.sql import functions as F
from torch import nn

import tritium as tr
from tritium.data.exchange import Exchange
from tritium.data.idset import HALF
from tritium.data.schema import Data
from tritium.ml import TorchSettings
from tritium.ml.fitting import prepare
from tritium.ml.torch.backend import TorchBackend

from .received import receive

ROUNDS = int(os.environ.get("TRITIUM_ORACLE_ROUNDS", "8")) // 4  # a round takes a Spark job
SIDES = ("train", "validation")
SIGMAS = 5  # by chance, a sum of independent draws is farther from its mean once in a million


class First(nn.Module):
    """Takes features of any width."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> Any:
        return x[:, :1] * self.weight


def data_of(frame: Any, features: Any = "x", **more: Any) -> dict[str, Data]:
    settings = TorchSettings(
        model=First, loss=nn.MSELoss(), optimizer=torch.optim.SGD, feature_cols=features,
        label_cols=["y"], **more,
    )  # fmt: skip
    return prepare(TorchBackend(), frame, settings, tr.Gang()).data


def keys_of(ranks: list[dict[str, Any]], name: str) -> list[list[int]]:
    """Return per rank the row numbers, which are the first feature."""
    found = (rank["columns"][name] for rank in ranks)
    return [columns["features"][:, 0].astype(int).tolist() if "features" in columns else [] for columns in found]


def joined(lists: list[list[int]]) -> list[int]:
    return sorted(value for one in lists for value in one)


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_random_frames_are_split_as_the_oracle_says(spark: Any, seed: int) -> None:
    random = np.random.default_rng(seed)
    rows, partitions, ranks = int(random.integers(200, 5000)), int(random.integers(1, 9)), int(random.integers(1, 5))
    fraction, draw, distinct = random.uniform(0.05, 0.6), int(random.integers(0, 2**40)), int(random.integers(1, 30))
    base = spark.range(0, rows, 1, partitions).select(
        F.col("id").alias("k"), (F.col("id") % distinct).alias("a"), (F.col("id") % 2).cast("double").alias("y")
    )
    base = base.where(F.col("k") % int(random.integers(2, 9)) != 0) if seed % 2 else base  # uneven partitions
    array = F.array(F.col("k").cast("float"), F.col("a").cast("float"))
    forms = {
        "columns": (base, ["k", "a"]),
        "array": (base.select(array.alias("x"), "y"), "x"),
        "vector": (base.select(array_to_vector(array).alias("x"), "y"), "x"),
    }
    asked: dict[str, Any] = {"validation": fraction, "seed": draw, "shuffle": ["full", "stream"][seed % 2]}
    data = {
        f"{form}_{side}": one
        for form, (frame, features) in forms.items()
        for side, one in data_of(frame, features, **asked).items()
    }
    received = receive(Exchange(data, ranks))
    oracle = base.select("k", F.xxhash64(F.lit(draw), F.monotonically_increasing_id()).alias("h")).collect()
    expected = {
        side: sorted(r.k for r in oracle if (r.h % 2**32 < int(fraction * 2**32)) == (side != "train"))
        for side in SIDES
    }
    for name in data:
        dealt = keys_of(received, name)
        assert joined(dealt) == expected[name.partition("_")[2]], (seed, name)
        counts = list(map(len, dealt))
        assert max(counts) - min(counts) <= partitions, (seed, name, counts)
    count, draws = len(expected["validation"]), len(oracle)
    assert abs(count - fraction * draws) < SIGMAS * (draws * fraction * (1 - fraction)) ** 0.5


def test_a_frame_whose_order_changes_is_split_in_one_evaluation(spark: Any) -> None:
    """A draw for each evaluation would leave rows out and take others twice; so would `rand` in a column."""
    source = spark.range(0, 3000, 1, 3).select((F.col("id") % 97).alias("k"), F.col("id").alias("n")).repartition(5)
    marked = source.withColumn("y", F.lit(0.0)).withColumn("held", F.rand() < 0.3)
    for validation in (0.3, "held"):
        exchange = Exchange(data_of(marked, ["n", "k"], validation=validation), 2)
        received = receive(exchange)
        train, held = (joined(keys_of(received, side)) for side in SIDES)
        assert sorted(train + held) == list(range(3000))
        assert abs(len(held) - 900) < SIGMAS * (3000 * 0.21) ** 0.5
        plan = exchange.frame._jdf.queryExecution().optimizedPlan().toString()
        assert plan.count("RepartitionByExpression") + plan.count("Repartition ") <= 2, "the source is read once"


def test_a_key_or_a_group_decides_in_any_order(spark: Any) -> None:
    rows = spark.range(0, 2000, 1, 2).select(F.col("id").alias("k"), F.lit(0.0).alias("y"))
    rows = rows.withColumn("who", F.concat(F.lit("user "), F.col("k") % 90)).withColumn("g", F.col("k") % 90)
    for more in ({"row_key": "k"}, {"validation_group": "who"}, {"row_key": "k", "validation_group": "who"}):
        splits = [
            joined(keys_of(receive(Exchange(data_of(frame, ["k", "g"], validation=0.3, **more), 2)), "validation"))
            for frame in (rows, rows.repartition(3).orderBy(F.desc("k")))
        ]
        assert splits[0] == splits[1]
        if "validation_group" in more:
            groups = {k % 90 for k in splits[0]}
            assert splits[0] == [k for k in range(2000) if k % 90 in groups]
            assert 5 < len(groups) < 50


def test_nulls_that_would_decide_nothing_are_errors(spark: Any) -> None:
    rows = spark.range(3).selectExpr(
        "double(id) as x", "0.0d as y", "nullif(id, 1) as who", "nullif(id = 2, false) as held"
    )
    for more, says in (
        ({"validation": 0.5, "validation_group": "who"}, "column 'who' holds a null, and rows are drawn by its values"),
        ({"validation": "held"}, "validation column 'held' holds a null; it must be True"),
    ):
        with pytest.raises(Exception, match=says):
            receive(Exchange(data_of(rows, ["x"], **more), 1))
    with pytest.raises(Exception, match="column 'held' of where= holds a null"):
        receive(Exchange({"a": Data(rows, ["x"], where=("held", True))}, 1))


def test_ids_of_the_two_sides_differ(spark: Any) -> None:
    """Where Spark sorts a shard by id, an id that comes twice would look like rows out of order."""
    ranks = receive(
        Exchange(data_of(spark.range(50).selectExpr("double(id) as x", "0.0d as y"), ["x"], validation=0.4), 1)
    )
    train, held = (set(ranks[0]["columns"][side]["_id"].tolist()) for side in SIDES)
    assert not train & held
    assert all(number & HALF for number in held)
