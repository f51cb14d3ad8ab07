"""Tune a Pipeline with Spark's CrossValidator: features, principal components, LightGBM on two ranks.

Data: scikit-learn's breast cancer, 569 tumours with 30 measurements.
"""

import os
import sys

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # the ranks' Python is this one

import numpy as np
from matplotlib.figure import Figure
from pyspark.ml import Pipeline
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.feature import PCA, StandardScaler, VectorAssembler
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder
from pyspark.sql import SparkSession
from sklearn.datasets import load_breast_cancer

from tritium.ml import LightGBMClassifier

SMALL = "EXAMPLE_SMALL" in os.environ  # the tests' size
COMPONENTS, RATES, FOLDS = ([1, 3], [0.1], 2) if SMALL else ([1, 3, 10], [0.02, 0.1], 2)


def main():
    spark = SparkSession.builder.master("local[2]").config("spark.ui.showConsoleProgress", "false").getOrCreate()
    data = load_breast_cancer(as_frame=True)
    rows = spark.createDataFrame(data.frame.rename(columns=lambda name: name.replace(" ", "_")))
    train, test = rows.randomSplit([0.8, 0.2], seed=1)

    # The scaler and the components learn from the rows of a fold alone, as they are stages of the pipeline.
    assembler = VectorAssembler(inputCols=[name for name in rows.columns if name != "target"], outputCol="measured")
    scaler = StandardScaler(inputCol="measured", outputCol="scaled", withMean=True)
    components = PCA(inputCol="scaled", outputCol="components")
    classifier = LightGBMClassifier(feature_cols="components", label_cols="target", num_iterations=40, ranks=2)
    pipeline = Pipeline(stages=[assembler, scaler, components, classifier])

    # A grid over the settings of two stages: Spark's own one and Tritium's.
    grid = ParamGridBuilder().addGrid(components.k, COMPONENTS).addGrid(classifier.learning_rate, RATES).build()
    evaluator = MulticlassClassificationEvaluator(labelCol="target", metricName="accuracy")
    search = CrossValidator(estimator=pipeline, estimatorParamMaps=grid, evaluator=evaluator, numFolds=FOLDS, seed=1)
    tuned = search.fit(train)

    best = grid[int(np.argmax(tuned.avgMetrics))]
    accuracy = evaluator.evaluate(tuned.transform(test))
    benign = test.where("target = 1").count() / test.count()
    chosen = f"{best[components.k]} components, learning rate {best[classifier.learning_rate]}"
    print(f"best of {len(grid)} combinations, by {FOLDS} folds: {chosen}")
    print(f"always benign: {benign:.1%} of {test.count()} held-out tumours are right")
    print(f"the best pipeline, trained again on all rows: {accuracy:.1%}")
    assert accuracy > benign + 0.1

    figure = Figure(figsize=(7.2, 3.6), layout="constrained")
    axes = figure.subplots()
    means = np.reshape(tuned.avgMetrics, (len(COMPONENTS), len(RATES)))
    errors = np.reshape(tuned.stdMetrics, means.shape)
    places = np.arange(len(COMPONENTS))
    for number, (rate, colour) in enumerate(zip(RATES, ("silver", "teal"), strict=False)):
        axes.bar(places + 0.4 * number, means[:, number], 0.38, yerr=errors[:, number], color=colour, label=rate)
    axes.set_xticks(places + 0.2, COMPONENTS)
    axes.axhline(benign, color="grey", linestyle="--")
    axes.set(title="Accuracy over the folds", xlabel="components", ylabel="accuracy (dashed: baseline)", ylim=(0.5, 1))
    axes.legend(title="learning rate", loc="lower right")
    figure.savefig("cross_validation.png", dpi=100)
    print("picture: cross_validation.png")
    spark.stop()


if __name__ == "__main__":
    main()
