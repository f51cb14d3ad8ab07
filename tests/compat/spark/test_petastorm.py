"""Petastorm's converter of DataFrames, and data sets written by Spark, read by ranks."""

from __future__ import annotations

import importlib.util
import logging
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.ml.linalg import Vectors
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import tritium as tr
from tritium.compat.petastorm import make_reader
from tritium.compat.petastorm.errors import PetastormMetadataGenerationError
from tritium.compat.petastorm.etl import dataset_metadata
from tritium.compat.petastorm.spark import SparkDatasetConverter, cache, make_spark_converter, spark_dataset_converter

pytestmark = pytest.mark.timeout(300)
DATA = Path(__file__).parents[1] / "data"


@pytest.fixture
def place(spark: SparkSession, tmp_path: Path) -> Iterator[Path]:
    """Let copies go to a directory, and return it."""
    spark.conf.set(SparkDatasetConverter.PARENT_CACHE_DIR_URL_CONF, f"file://{tmp_path}/copies dir/")
    yield tmp_path / "copies dir"
    spark.conf.unset(SparkDatasetConverter.PARENT_CACHE_DIR_URL_CONF)
    for each in list(cache._copies):
        cache.forget(each.url)


def test_a_converter_in_two_ranks(spark: SparkSession, place: Path) -> None:
    rows = [(float(i), Vectors.dense([i, i + 1]), [i / 2], i) for i in range(101)]
    df = spark.createDataFrame(rows, ["x", "features", "list", "label"]).repartition(3)
    converter = make_spark_converter(df)
    assert len(converter) == converter.dataset_size == 101
    assert make_spark_converter(df.select("*")).cache_dir_url == converter.cache_dir_url  # an equal plan
    assert make_spark_converter(df, dtype=None).cache_dir_url != converter.cache_dir_url
    assert len(os.listdir(place)) == 2

    def train() -> Any:
        import horovod.torch as hvd
        from petastorm.pytorch import BatchedDataLoader

        hvd.init()
        shard = {"cur_shard": hvd.rank(), "shard_count": hvd.size()}
        with converter.make_torch_dataloader(batch_size=7, num_epochs=1, **shard) as loader:
            batches = list(loader)
        with converter.make_torch_dataloader(10, data_loader_fn=BatchedDataLoader, **shard) as endless:
            many = [len(batch["x"]) for batch, _ in zip(endless, range(20), strict=False)]
        return [
            (len(b["x"]), str(b["x"].dtype), tuple(b["features"].shape), b["label"].tolist()) for b in batches
        ], many

    import tritium.compat  # noqa: F401

    found = tr.launch(train, ranks=2, on="driver", framework="horovod", progress=False, output="none", retries=0)
    sizes = [[batch[0] for batch in rank] for rank, _ in found]
    assert sizes == [[7] * 7 + [2]] * 2
    assert {batch[1:3] for rank, _ in found for batch in rank if batch[0] == 7} == {("torch.float32", (7, 2))}
    assert {label for rank, _ in found for batch in rank for label in batch[3]} == set(range(101))
    assert found[0][1] == [10] * 20
    copy = pickle.loads(pickle.dumps(converter))
    copy.delete()
    assert len(os.listdir(place)) == 1
    assert make_spark_converter(df).cache_dir_url != converter.cache_dir_url


@pytest.fixture(scope="module")
def tensorflow() -> Any:
    """Import TensorFlow, which sets environment variables and starts threads, before a test counts them."""
    found = pytest.importorskip("tensorflow")
    list(found.data.Dataset.range(2).map(lambda x: x + 1).prefetch(1))
    return found


def test_a_converter_for_tensorflow(spark: SparkSession, place: Path, tensorflow: Any) -> None:
    converter = make_spark_converter(
        spark.range(50).select(F.col("id"), F.array(F.col("id") / 2).alias("v"), F.lit("a").alias("s"))
    )
    with converter.make_tf_dataset(batch_size=8, num_epochs=1, shuffling_queue_capacity=20, seed=1) as dataset:
        batches = list(dataset)
    assert [len(batch.id) for batch in batches] == [8] * 6 + [2]
    assert sorted(int(i) for batch in batches for i in batch.id) == list(range(50))
    assert (batches[0].v.shape, batches[0].v.dtype.name, batches[0].s[0].numpy()) == ((8, 1), "float32", b"a")
    with converter.make_tf_dataset(4) as endless:
        assert len(list(endless.take(30))) == 30


def test_wrong_settings(spark: SparkSession, place: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    df = spark.range(4, numPartitions=2)
    with pytest.raises(RuntimeError, match=r"compression_codec='snapy'. Did you mean 'snappy'"):
        make_spark_converter(df, compression_codec="snapy")
    with pytest.raises(ValueError, match="dtype='float16'"):
        make_spark_converter(df, dtype="float16")
    spark.conf.set(SparkDatasetConverter.PARENT_CACHE_DIR_URL_CONF, "/copies")
    with pytest.raises(ValueError, match=r"has no scheme. Write file:///copies"):
        make_spark_converter(df)
    spark.conf.set(SparkDatasetConverter.PARENT_CACHE_DIR_URL_CONF, f"file://{place}")
    with caplog.at_level(logging.WARNING):
        converter = make_spark_converter(df)
        assert "less than 50 MB are slow to read" in caplog.text
    monkeypatch.setenv("HOROVOD_RANK", "1")
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    with converter.make_torch_dataloader(num_epochs=1, cur_shard=0, shard_count=1) as loader:
        assert len(list(loader)) == 1
    assert "cur_shard=0, shard_count=1, but this is rank 1 of 2" in caplog.text
    monkeypatch.setattr(spark_dataset_converter, "_WAIT", 0.2)
    converter.delete()
    with pytest.raises(RuntimeError, match=r"2 of 2 files of the converter are not there after 0.2 s"):
        converter.make_torch_dataloader().__enter__()


def test_a_data_set_is_written_as_petastorm_writes_it(spark: SparkSession, tmp_path: Path) -> None:
    import tritium.compat  # noqa: F401

    spec = importlib.util.spec_from_file_location("write_petastorm", DATA / "write_petastorm.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    import petastorm
    import petastorm.codecs
    import petastorm.etl.dataset_metadata
    import petastorm.unischema

    script.write(spark, f"file://{tmp_path}/data", petastorm)
    assert not (tmp_path / "data/._common_metadata.crc").exists()
    with make_reader(f"file://{tmp_path}/data", ["id", "png", "matrix"]) as ours:
        found = {int(row.id): row for row in ours}
    with make_reader(f"file://{DATA}/petastorm", ["id", "png", "matrix"]) as theirs:
        for row in theirs:
            assert (row.png == found[int(row.id)].png).all()
            assert (row.matrix == found[int(row.id)].matrix).all()
    schema = script.schema(petastorm.codecs, petastorm.unischema)
    nowhere = pytest.raises(PetastormMetadataGenerationError, match="Nothing was written")
    with nowhere, dataset_metadata.materialize_dataset(spark, f"file://{tmp_path}/empty", schema):
        pass
