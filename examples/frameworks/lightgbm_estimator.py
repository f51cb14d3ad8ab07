"""Train LightGBM's classifier and regressor on DataFrames with two ranks, and score with them."""

import os
import sys

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

from pyspark.ml.evaluation import BinaryClassificationEvaluator, RegressionEvaluator
from pyspark.sql import SparkSession
from sklearn.datasets import load_breast_cancer, load_diabetes

from tritium.ml import LightGBMClassifier, LightGBMRegressor

SETTINGS = {"num_leaves": 15, "num_iterations": 200, "validation": 0.2, "early_stopping": 10, "ranks": 2}


def main():
    spark = SparkSession.builder.master("local[2]").getOrCreate()
    cells = spark.createDataFrame(load_breast_cancer(as_frame=True).frame.rename(columns=lambda c: c.replace(" ", "_")))
    train, test = cells.randomSplit([0.8, 0.2], seed=1)
    features = [name for name in cells.columns if name != "target"]
    classifier = LightGBMClassifier(feature_cols=features, label_cols="target", metrics=["auc"], **SETTINGS).fit(train)
    scored = classifier.transform(test)
    auc = BinaryClassificationEvaluator(labelCol="target").evaluate(scored)
    top = max(classifier.feature_importances("gain").items(), key=lambda item: item[1])
    print(f"breast cancer: AUC {auc:.3f} after {classifier.booster().num_trees()} trees; most gained by {top[0]}")
    assert auc > 0.95

    people = spark.createDataFrame(load_diabetes(as_frame=True).frame)
    train, test = people.randomSplit([0.8, 0.2], seed=1)
    features = [name for name in people.columns if name != "target"]
    regressor = LightGBMRegressor(
        feature_cols=features, label_cols="target", learning_rate=0.05, monotone_constraints={"bmi": 1}, **SETTINGS
    ).fit(train)
    r2 = RegressionEvaluator(labelCol="target", metricName="r2").evaluate(regressor.transform(test))
    print(f"diabetes: r2 {r2:.3f} after {regressor.booster().num_trees()} trees")
    assert r2 > 0.2
    spark.stop()


if __name__ == "__main__":
    main()
