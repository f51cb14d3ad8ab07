"""Tell from the first sentence of a docstring which library it documents: text in a column, two ranks.

Data: the source files of matplotlib, NumPy, pandas and PySpark as they are installed. Spark's tasks parse them.
"""

import ast
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # the ranks' Python is this one

import pandas as pd
import torch
from matplotlib.figure import Figure
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.feature import RegexTokenizer
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from tritium.ml import TorchEstimator

SMALL = "EXAMPLE_SMALL" in os.environ  # the tests' size
LIBRARIES = ["matplotlib", "numpy", "pandas", "pyspark"]
GIVEAWAY = re.compile(r"\S*(matplotlib|plt|numpy|np\.|pandas|pd\.|spark)\S*", re.IGNORECASE)
LENGTH = 24  # words that are read of a sentence


def list_files():
    """Return the source files as rows: `library`, `path`."""
    rows = []
    for library in LIBRARIES:
        paths = sorted(Path(find_spec(library).origin).parent.rglob("*.py"))
        paths = [str(path) for path in paths if "tests" not in path.parts]
        rows += [(library, path) for path in paths[:: 8 if SMALL else 1]]
    return rows


def first_sentences(batches):
    """Yield `library` and `text` of each docstring whose first sentence has four words or more."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for batch in batches:
        rows = []
        for library, path in batch.itertuples(index=False):
            nodes = ast.walk(ast.parse(Path(path).read_text(encoding="utf-8")))
            texts = (ast.get_docstring(node) or "" for node in nodes if isinstance(node, kinds))
            rows += [(library, GIVEAWAY.sub("", re.split(r"\n\n|\. |\.$", text)[0])) for text in texts]
        yield pd.DataFrame([row for row in rows if len(row[1].split()) >= 4], columns=["library", "text"])


class Classifier(torch.nn.Module):
    """A layer over the mean of the words' embeddings."""

    def __init__(self, words):
        super().__init__()
        self.words = torch.nn.EmbeddingBag(words, 64)
        self.last = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(64, len(LIBRARIES)))

    def forward(self, words):
        return self.last(self.words(words))


def draw(counts):
    """Draw which library a text was from, and which the model takes it for."""
    shares = counts.div(counts.sum(axis=1), axis=0)
    figure = Figure(figsize=(7.2, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.imshow(shares, cmap="BuGn", vmin=0, vmax=1, aspect="auto")
    axes.set(title="Held-out docstrings", xlabel="library by the model", ylabel="library of the docstring")
    axes.set_xticks(range(len(LIBRARIES)), LIBRARIES)
    axes.set_yticks(range(len(LIBRARIES)), LIBRARIES)
    for y, x in ((y, x) for y in range(len(LIBRARIES)) for x in range(len(LIBRARIES))):
        axes.text(x, y, f"{shares.iloc[y, x]:.0%}", ha="center", color="white" if x == y else "black")
    figure.savefig("docstrings.png", dpi=100)
    print("picture: docstrings.png")


def main():
    few = {"spark.sql.shuffle.partitions": "4"}  # 200 by default, for a cluster
    spark = SparkSession.builder.master("local[2]").config(map=few).getOrCreate()
    files = spark.createDataFrame(list_files(), "library string, path string").repartition(4, "path")
    texts = files.mapInPandas(first_sentences, "library string, text string").dropDuplicates(["text"])
    words = RegexTokenizer(inputCol="text", outputCol="words", pattern=r"\W+").transform(texts)
    words = words.withColumn("words", F.slice("words", 1, LENGTH)).where(F.size("words") > 0).cache()
    held_out = F.pmod(F.xxhash64("text"), F.lit(5)) == 0
    train, test = words.where(~held_out), words.where(held_out)
    model = TorchEstimator(
        model=lambda vocabulary: Classifier(len(vocabulary["words"]) + 1),  # one more, for words that come later
        loss=torch.nn.CrossEntropyLoss(),
        optimizer=lambda weights: torch.optim.Adam(weights, lr=0.01),
        feature_cols={"words": "words"},
        label_cols="library",
        label_index_col="index",  # for Spark's evaluators
        vocabulary={"words": 10_000, "library": LIBRARIES},  # the most frequent words are learnt from the rows
        unknown_words="keep",
        pad={"words": LENGTH},
        validation=0.1,
        batch_size=32 if SMALL else 64,
        epochs=6 if SMALL else 10,
        ranks=2,
    ).fit(train)

    scored = model.transform(test).cache()
    accuracy = MulticlassClassificationEvaluator(labelCol="index", metricName="accuracy").evaluate(scored)
    counts = scored.groupBy("library").pivot("prediction_label", LIBRARIES).count().toPandas().set_index("library")
    counts = counts.reindex(LIBRARIES).fillna(0)
    baseline = counts.sum(axis=1).max() / counts.to_numpy().sum()
    print(f"most frequent library: {baseline:.1%} of {scored.count():,} held-out docstrings are right")
    print(f"network on two ranks: {accuracy:.1%}")
    assert accuracy > baseline + 0.1
    draw(counts)
    spark.stop()


if __name__ == "__main__":
    main()
