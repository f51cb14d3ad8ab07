"""Tell benign from malignant tumours (scikit-learn's breast cancer data) with a LightningModule on two ranks."""

import os
import sys

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

import lightning
import torch
from pyspark.ml.evaluation import BinaryClassificationEvaluator
from pyspark.ml.functions import vector_to_array
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from sklearn.datasets import load_breast_cancer

from tritium.ml import LightningEstimator


class Classifier(lightning.LightningModule):
    def __init__(self, inputs, rate=0.01):
        super().__init__()
        self.save_hyperparameters()
        self.layers = torch.nn.Sequential(
            torch.nn.BatchNorm1d(inputs), torch.nn.Linear(inputs, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2)
        )

    def forward(self, features):
        return self.layers(features)

    def training_step(self, batch, batch_idx):
        features, label = batch
        return torch.nn.functional.cross_entropy(self(features), label)

    def validation_step(self, batch, batch_idx):
        features, label = batch
        scores = self(features)
        self.log("accuracy", (scores.argmax(1) == label).float().mean())
        return torch.nn.functional.cross_entropy(scores, label)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), self.hparams.rate)


def main():
    spark = SparkSession.builder.master("local[2]").getOrCreate()
    data = load_breast_cancer(as_frame=True)
    names = [name.replace(" ", "_") for name in data.feature_names]
    rows = spark.createDataFrame(data.frame.set_axis([*names, "benign"], axis=1))
    train, test = rows.withColumn("benign", F.col("benign").cast("int")).randomSplit([0.8, 0.2], seed=1)
    model = LightningEstimator(
        model=lambda: Classifier(len(names)),
        feature_cols=names,
        label_cols="benign",
        task="classification",
        validation=0.1,
        early_stopping=5,
        epochs=20,
        ranks=2,
        trainer_args={"gradient_clip_val": 1.0},
    ).fit(train)
    scored = model.transform(test).withColumn("score", vector_to_array("probability")[1])
    area = BinaryClassificationEvaluator(labelCol="benign", rawPredictionCol="score").evaluate(scored)
    print(f"area under the ROC curve: {area:.3f}, after {len(model.history)} epochs")
    assert area > 0.97
    spark.stop()


if __name__ == "__main__":
    main()
