"""TensorFlowOnSpark's calls on a Spark session."""

from __future__ import annotations

import importlib
import json
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tritium.errors import BadSetting, RankFailed, TritiumWarning

pytestmark = pytest.mark.timeout(300)


def feeding(args: Any, ctx: Any) -> None:
    """Take the rows of a feed until it ends, and write what was seen."""
    from tensorflowonspark import TFNode

    taken = []
    tf_feed = TFNode.DataFeed(ctx.mgr, False)
    while not tf_feed.should_stop():
        batch = tf_feed.next_batch(5)
        assert len(batch) <= 5
        taken += [row[1]["label"] for row in batch]
        if args.answer:
            tf_feed.batch_results([sum(row[0]) for row in batch])
    config = json.loads(os.environ["TF_CONFIG"])
    place = [ctx.job_name, ctx.task_index, ctx.num_workers, config["task"], sorted(config["cluster"])]
    Path(args.out, str(ctx.executor_id)).write_text(json.dumps([taken, place]))


def test_rows_of_an_rdd_are_fed_and_results_come_back_in_order(spark: SparkSession, tmp_path: Path) -> None:
    importlib.import_module("tritium.compat")
    TFCluster = importlib.import_module("tensorflowonspark.TFCluster")
    rdd = spark.sparkContext.parallelize([([number, 1], {"label": number}) for number in range(23)], 3)
    args = Namespace(out=str(tmp_path), answer=False)
    settings = {"input_mode": TFCluster.InputMode.SPARK, "master_node": "chief"}
    cluster = TFCluster.run(spark.sparkContext, feeding, args, 2, 0, **settings)
    cluster.train(rdd, num_epochs=2)
    with pytest.raises(NotImplementedError, match="give the union of the RDDs"):
        cluster.train(rdd)
    cluster.shutdown()
    (first, chief), (second, worker) = [json.loads((tmp_path / rank).read_text()) for rank in "01"]
    assert sorted(first + second) == sorted([*range(23)] * 2)
    assert min(len(first), len(second)) > 0
    assert chief == ["chief", 0, 2, {"type": "chief", "index": 0}, ["chief", "worker"]]
    assert worker == ["worker", 0, 2, {"type": "worker", "index": 0}, ["chief", "worker"]]

    cluster = TFCluster.run(spark.sparkContext, feeding, Namespace(out=str(tmp_path), answer=True), 2, 0, **settings)
    results = cluster.inference(rdd)
    assert results.getNumPartitions() == 3
    assert results.collect() == [number + 1 for number in range(23)]
    cluster.shutdown()


def test_a_function_that_reads_itself_is_waited_for(spark: SparkSession, tmp_path: Path) -> None:
    importlib.import_module("tritium.compat")
    TFCluster = importlib.import_module("tensorflowonspark.TFCluster")
    TFParallel = importlib.import_module("tensorflowonspark.TFParallel")

    def failing(args: Any, ctx: Any) -> None:
        if ctx.executor_id == 1:
            raise ValueError(f"{args} {ctx.absolute_path('data')}")

    with pytest.warns(TritiumWarning, match="tensorboard --logdir logs"):
        cluster = TFCluster.run(spark.sparkContext, failing, ["train.py"], 2, 0, tensorboard=True, log_dir="logs")
    assert cluster.tensorboard_url() is None
    with pytest.raises(BadSetting, match=r"InputMode\.SPARK"):
        cluster.train(None)
    with pytest.raises(RankFailed, match=rf"\['train.py'\] file:///.*{Path.cwd().name}/data"):
        cluster.shutdown()

    def alone(args: Any, ctx: Any) -> None:
        Path(args, str(ctx.worker_num)).write_text(f"{ctx.num_workers} {'TF_CONFIG' in os.environ}")

    assert TFParallel.run(spark.sparkContext, alone, str(tmp_path), 2) is None
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["2 False"] * 2


def test_what_is_not_there_is_refused_by_name(spark: SparkSession) -> None:
    importlib.import_module("tritium.compat")
    names = ("TFCluster", "TFNode", "dfutil", "pipeline")
    TFCluster, TFNode, dfutil, pipeline = (importlib.import_module(f"tensorflowonspark.{name}") for name in names)
    sc, spark_mode = spark.sparkContext, TFCluster.InputMode.SPARK
    with pytest.raises(BadSetting, match=r"num_ps=1.* with InputMode.SPARK"):
        TFCluster.run(sc, print, None, 3, 1, input_mode=spark_mode)
    with pytest.raises(BadSetting, match="eval_node=…"):
        TFCluster.run(sc, print, None, 2, 0, eval_node=True)
    cluster = TFCluster.run(sc, print, None, 2, 0, input_mode=spark_mode)
    with pytest.raises(NotImplementedError, match="DStreams are not fed"):
        cluster.train(object())
    with pytest.warns(TritiumWarning, match="never run"):
        cluster.shutdown()
    with pytest.raises(NotImplementedError, match="MultiWorkerMirroredStrategy"):
        TFNode.start_cluster_server(None)
    with pytest.raises(ValueError, match=r"InputMode\.SPARK"):
        TFNode.DataFeed(None)
    with pytest.raises(NotImplementedError, match="KerasEstimator"):
        dfutil.saveAsTFRecords(None, "")
    with pytest.raises(NotImplementedError, match="KerasEstimator"):
        pipeline.TFEstimator(None, None)
