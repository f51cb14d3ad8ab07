"""Bike sharing: train on two Spark tasks straight from a DataFrame, then score a batch and a stream.

Data: H. Fanaee-T and J. Gama, "Event labeling combining ensemble detectors and background knowledge", 2013; Readme.txt.
"""

import sys
import time
from pathlib import Path

import torch
from matplotlib.figure import Figure
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from tritium.ml import TorchEstimator, TorchModel


def quality(hours):
    """R² of the bikes, and RMSLE: `prediction` is the logarithm of one more than them."""
    bikes = hours.withColumn("bikes", F.expm1("prediction"))
    r2 = RegressionEvaluator(labelCol="cnt", predictionCol="bikes", metricName="r2").evaluate(bikes)
    rmsle = RegressionEvaluator(labelCol="log_cnt", metricName="rmse").evaluate(bikes)
    return f"R² {r2:.3f}, RMSLE {rmsle:.3f}"


csv = sys.argv[1] if len(sys.argv) > 1 else f"{Path(__file__).resolve().parent}/bike-sharing/hour.csv"
run_dir = f"{Path.cwd()}/tritium-runs/{time.strftime('bikes-%Y%m%d-%H%M%S')}"
quiet = {"spark.log.level": "ERROR", "spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false"}
trust = {"spark.tritium.trustModels": "true"}  # the model that is loaded below is our own
spark = SparkSession.builder.master("local[2]").config(map=quiet | trust).getOrCreate()

# Numbers as they are, what comes round again as sine and cosine, categories one-hot; 20 % of the hours held out.
hours = spark.read.csv(csv, header=True, inferSchema=True).withColumn("log_cnt", F.log1p("cnt"))
numbers = {name: F.col(name) for name in ("yr", "holiday", "workingday", "temp", "atemp", "hum", "windspeed")}
cycles = [(name, period, 2 * F.pi() * F.col(name) / period) for name, period in (("hr", 24), ("hr", 12), ("mnth", 12))]
waves = {f"{name}_{wave.__name__}{period}": wave(angle) for name, period, angle in cycles for wave in (F.sin, F.cos)}
kinds = (("hr", range(24)), ("weekday", range(7)), ("season", range(1, 5)), ("weathersit", range(1, 4)))
flags = {f"{name}_is_{value}": F.col(name) == value for name, values in kinds for value in values}
features = {name: column.cast("float") for name, column in (numbers | waves | flags).items()}
held_out = F.pmod(F.xxhash64(*hours.columns), F.lit(5)) == 0
train, test = (hours.filter(rows).withColumns(features) for rows in (~held_out, held_out))

torch.manual_seed(0)
layers = [torch.nn.Linear(len(features), 64), torch.nn.SiLU(), torch.nn.Linear(64, 64), torch.nn.SiLU()]
estimator = TorchEstimator(
    model=torch.nn.Sequential(*layers, torch.nn.Linear(64, 1)),
    loss=torch.nn.MSELoss(),
    optimizer=lambda weights: torch.optim.AdamW(weights, lr=5e-3),
    lr_scheduler=lambda optimizer, steps: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps),
    feature_cols=list(features),
    label_cols=["log_cnt"],
    validation=0.1,
    batch_size=64,
    epochs=20,
    ranks=2,
    run_dir=run_dir,
)
estimator.fit(train).save(f"{run_dir}/model")
model = TorchModel.load(f"{run_dir}/model")
usual = train.groupBy("hr", "workingday").agg(F.log1p(F.avg("cnt")).alias("prediction"))
print("held-out hours, guessed by hour and working day:", quality(test.join(usual, ["hr", "workingday"])))
batch = model.transform(test).cache()
print("scored as a batch:", quality(batch))

test.repartition(4).write.parquet(f"{run_dir}/events")
events = spark.readStream.schema(test.schema).option("maxFilesPerTrigger", 1).parquet(f"{run_dir}/events")
scores = model.transform(events).writeStream.trigger(availableNow=True)
scores.start(f"{run_dir}/scored", format="parquet", checkpointLocation=f"{run_dir}/offsets").awaitTermination()
print("scored as a stream of files:", quality(spark.read.parquet(f"{run_dir}/scored")))

figure = Figure(figsize=(7.2, 3.6), layout="constrained")
counts, losses = figure.subplots(1, 2)
counts.scatter(*batch.select("cnt", F.expm1("prediction")).toPandas().to_numpy().T, s=4)
counts.set(title="Held-out hours", xlabel="bikes rented", ylabel="bikes predicted")
curves = losses.plot([[epoch["loss"], epoch["validation_loss"]] for epoch in model.history])
losses.legend(curves, ["training", "validation"])
losses.set(title="Loss", xlabel="epoch", ylabel="MSE of log(1 + bikes)", yscale="log")
figure.savefig(f"{run_dir}/bikes.png")
print(f"picture: {run_dir}/bikes.png\nrun directory: {run_dir}")
