"""The code in the pages runs: each page's Python blocks, one after the other, as one program."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

import advice

from . import in_turn

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    "README.md",
    "docs/quickstart.md",
    "docs/tasks/table.md",
    "docs/tasks/pytorch.md",
    "docs/tasks/images.md",
    "docs/tasks/text.md",
    "docs/tasks/overnight.md",
    "docs/tasks/services.md",
    "docs/tasks/explain.md",
    "docs/tasks/lightgbm.md",
    "docs/tasks/cluster.md",
    "docs/tasks/failures.md",
    "docs/tasks/trackers.md",
    "docs/tasks/migrate.md",
    "docs/launch.md",
    "docs/data.md",
    "docs/errors.md",
    "docs/checkpoints.md",
    "docs/estimator.md",
    "docs/function-estimator.md",
    "docs/lightning-estimator.md",  # first: Lightning cannot be imported after TensorFlow, see its Limits
    "docs/several-optimizers.md",
    "docs/keras-estimator.md",
    "docs/tasks/keras.md",
    "docs/lightgbm-estimator.md",
    "docs/prediction.md",
    "docs/frameworks/torch.md",
    "docs/frameworks/lightning.md",
    "docs/frameworks/huggingface.md",
    "docs/frameworks/jax.md",
    "docs/frameworks/keras.md",
    "docs/frameworks/lightgbm.md",
    "docs/frameworks/scikit-learn.md",
    "docs/frameworks/mpi.md",
    "docs/frameworks/horovod.md",
    "docs/frameworks/tensorflow.md",
    "docs/migrate/horovodrunner.md",
    "docs/migrate/horovod-torch.md",
    "docs/migrate/distributors.md",
    "docs/migrate/petastorm.md",
    "docs/migrate/horovod-keras.md",
)

# What a page takes as given: a session, data, and what an earlier page has made.
GIVEN = {
    "docs/estimator.md": """
import os
import torch
from pyspark.sql import SparkSession, functions as F
spark = SparkSession.builder.master("local[2]").getOrCreate()
columns = ["hour", "temperature", "humidity", "rented"]
train_df = test_df = spark.range(200).select(*((F.rand(i) * 10).alias(name) for i, name in enumerate(columns)))
pandas_df = train_df.toPandas()
import numpy as np
cities = F.element_at(F.array(*map(F.lit, ["Rome", "Oslo", "Lima"])), (F.col("id") % 3 + 1).cast("int"))
real_df = spark.range(200).select(
    *((F.rand(i) * 10).alias(name) for i, name in enumerate(columns)), cities.alias("city"),
    F.expr("binary(repeat(char(id % 90 + 33), 64))").alias("photo"))
photos_file = os.path.abspath("photos.npy")
np.save(photos_file, np.random.default_rng(1).random((200, 64), np.float32))
index_df = spark.range(200).select(F.col("id").alias("index"), (F.rand(1) * 10).alias("rented"))

def make_net():
    return torch.nn.Linear(2, 1)
""",
    "docs/tasks/table.md": "import os",
    "docs/tasks/overnight.md": """
import os
import torch
from pyspark.sql import SparkSession, functions as F
spark = SparkSession.builder.master("local[2]").getOrCreate()
place = os.getcwd()
spark.range(0, 300, 1, 6).select("id", F.rand(1).alias("temp"), (F.col("id") % 24).alias("hr")).write.parquet(
    f"{place}/warehouse/hours")
import tritium as tr
example = spark.read.parquet(f"{place}/warehouse/hours").select("temp", "hr").toPandas()
tr.Model(torch.nn.Linear(2, 1), example=example).save("models/bikes")
""",
    "docs/tasks/services.md": """
import socket, threading
import uvicorn
from pyspark.sql import SparkSession
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

async def sentiment(request):
    text = (await request.json())["inputs"]
    return JSONResponse({"label": "good"} if "good" in text else {"error": "no idea"}, 200 if "o" in text else 404)

listening = socket.create_server(("127.0.0.1", 0))
service_url = f"http://127.0.0.1:{listening.getsockname()[1]}/sentiment"
config = uvicorn.Config(Starlette(routes=[Route("/sentiment", sentiment, methods=["POST"])]), log_level="warning")
threading.Thread(target=uvicorn.Server(config).run, args=([listening],), daemon=True).start()
spark = SparkSession.builder.master("local[2]").getOrCreate()
reviews = spark.createDataFrame([(1, "a good book"), (2, "bad")], ["id", "text"])
""",
    "docs/prediction.md": """
import mlflow
mlflow.set_tracking_uri("sqlite:///mlflow.db")
mlflow.set_experiment("a page")  # MLflow remembers that of an earlier page, which this file of a database lacks.
import torch
import tritium as tr
from pyspark.sql import SparkSession, functions as F
from pyspark.sql.functions import *
from tritium.ml import TorchEstimator
spark = SparkSession.builder.master("local[2]").getOrCreate()
columns = ["temp", "hum", "hr", "cnt"]
train_df = df = spark.range(200).select(*((F.rand(i) * 10).alias(name) for i, name in enumerate(columns)))
pandas_df = df.toPandas()
module = torch.nn.Linear(3, 1)
estimator = TorchEstimator(
    model=lambda: torch.nn.Linear(3, 1), loss=torch.nn.MSELoss(), optimizer=torch.optim.Adam,
    feature_cols=["temp", "hum", "hr"], label_cols=["cnt"], ranks=1)
""",
}
ELSEWHERE_RUN = ("docs/quickstart.md", "docs/tasks/cluster.md")  # test_quickstart.py, test_cluster.py
# Places that a page names, and what stands for them here.
PLACES = {
    "s3://models/bikes": "models/bikes-here",
    '"warehouse/hours"': 'f"{place}/warehouse/hours"',  # The JVM's directory is that of the first page.
    '"parquet:warehouse': 'f"parquet:{place}/warehouse',
    # The JVM's directory is that of the first page, as all pages run in one process.
    'spark.read.csv("customers.csv"': 'spark.read.csv(os.path.abspath("customers.csv")',
    '"https://models.example.com/sentiment"': "service_url",
    'save("churn-model")': 'save(os.path.abspath("churn-model"))',
    'load("churn-model")': 'load(os.path.abspath("churn-model"))',
    "examples/bike-sharing/hour.csv": str(ROOT / "examples/bike-sharing/hour.csv"),
}
ELSEWHERE = (
    "docs/flyte.md",  # in tests/flyte/pods, in a home of its own, as the next one
    "docs/flyte-v1.md",
    "docs/tasks/stream.md",  # with a Kafka broker: tests/servers/test_stream_page.py
)


def program(page: str) -> str:
    code = [code for _, code in advice.blocks(ROOT / page, "python")]
    text = "\n".join([GIVEN.get(page, ""), *code])
    for place, here in PLACES.items():
        text = text.replace(place, here)
    return text


def test_every_page_with_python_is_run() -> None:
    pages = {str(page.relative_to(ROOT)) for page in advice.PAGES if list(advice.blocks(page, "python"))}
    assert pages == {*PAGES, *ELSEWHERE}


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[in_turn.Programs]:
    programs = in_turn.Programs(tmp_path_factory.mktemp("pages"), os.environ)
    yield programs
    programs.close()


@pytest.mark.parametrize("page", [page for page in PAGES if page not in ELSEWHERE_RUN])
def test_the_examples_run(page: str, programs: in_turn.Programs, tmp_path: Path) -> None:
    if page.endswith("horovod.md") and find_spec("horovod") is None:
        pytest.skip("horovod is not installed: make horovod")
    path = tmp_path / "page.py"
    path.write_text(f'if __name__ == "__main__":\n{_indented(program(page))}')
    programs.run(path, tmp_path)


def test_the_readme_example_has_fifteen_lines() -> None:
    assert len([line for line in program("README.md").splitlines() if line.strip()]) <= 15


def _indented(text: str) -> str:
    return "".join(f"    {line}\n" if line else "\n" for line in text.splitlines())
