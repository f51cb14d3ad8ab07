"""Forecast what stores sell in the next six weeks: time series, an embedding for each column of words, two ranks.

Data: two tables like those of Kaggle's Rossmann competition, made by rossmann/generate.py. Their noise is 8 %.
"""

import os
import sys

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # the ranks' Python is this one

import torch
from matplotlib.figure import Figure
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from rossmann.generate import write

from tritium.ml import TorchEstimator

SMALL = "EXAMPLE_SMALL" in os.environ  # the tests' size
STORES, DAYS, LAST_TRAINED = 10 if SMALL else 100, 730, "2014-11-19"  # two years; the last six weeks are held out
WORDS = ["Store", "DayOfWeek", "Month", "StateHoliday", "StoreType", "Assortment"]  # each gets an embedding
NUMBERS = ["Promo", "SchoolHoliday", "Day", "Distance", "Years", "Sine", "Cosine", "ToChristmas"]


def read(spark, folder):
    """Return the features and `LogSales` for each store and day on which it sold something."""
    files = [f"{folder}/train.csv", f"{folder}/store.csv"]
    sales, stores = (spark.read.csv(file, header=True, inferSchema=True) for file in files)
    rows = sales.where("Sales > 0").join(F.broadcast(stores), "Store")
    day_of_year = F.dayofyear("Date")
    angle = 2 * F.pi() * day_of_year / 365
    numbers = {
        "Promo": F.col("Promo"),
        "SchoolHoliday": F.col("SchoolHoliday"),
        "Day": F.dayofmonth("Date"),
        "Distance": F.log1p(F.coalesce("CompetitionDistance", F.lit(0))),
        "Years": F.datediff("Date", F.lit("2013-01-01")) / 365,
        "Sine": F.sin(angle),
        "Cosine": F.cos(angle),
        "ToChristmas": F.exp((day_of_year - 359) / 12),
    }
    rows = rows.withColumns({"Month": F.month("Date"), "LogSales": F.log("Sales").cast("float")})
    rows = rows.withColumns({name: F.col(name).cast("string") for name in WORDS})
    rows = rows.withColumns({name: column.cast("float") for name, column in numbers.items()})
    return rows.select("Date", "Sales", "LogSales", *WORDS, *NUMBERS).cache()


class Forecast(torch.nn.Module):
    """An embedding for each column of words, and three dense layers over these and the numbers."""

    def __init__(self, vocabulary):
        super().__init__()
        self.words = torch.nn.ModuleDict({name: torch.nn.Embedding(len(vocabulary[name]) + 1, 8) for name in WORDS})
        width = 8 * len(WORDS) + len(NUMBERS)
        layers = [torch.nn.Linear(width, 128), torch.nn.SiLU(), torch.nn.Linear(128, 128), torch.nn.SiLU()]
        self.layers = torch.nn.Sequential(*layers, torch.nn.Linear(128, 1))
        torch.nn.init.constant_(self.layers[-1].bias, 8.7)  # about the mean of LogSales

    def forward(self, numbers, **words):
        return self.layers(torch.cat([numbers, *(self.words[name](words[name]) for name in WORDS)], 1))


def rmspe(rows, forecast):
    """Return the competition's error: the root of the mean square of relative errors."""
    return rows.agg(F.sqrt(F.avg((F.col(forecast) / F.col("Sales") - 1) ** 2))).first()[0]


def draw(days):
    """Draw the days of one store: what it sold, the average, and the forecast."""
    figure = Figure(figsize=(7.2, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.plot(days.Date, days.Sales, "o", color="black", markersize=4, label="sold")
    axes.plot(days.Date, days.usual, color="silver", label="average of weekday and promotion")
    axes.plot(days.Date, days.forecast, color="teal", label="forecast")
    axes.set(title="Six weeks of one store, not trained on", ylabel="sales of a day", ylim=(0, None))
    axes.tick_params("x", rotation=20)
    axes.legend()
    figure.savefig("store_sales.png", dpi=100)
    print("picture: store_sales.png")


def main():
    spark = SparkSession.builder.master("local[2]").config("spark.sql.shuffle.partitions", 4).getOrCreate()
    write("store_sales", stores=STORES, days=DAYS)
    rows = read(spark, os.path.abspath("store_sales"))
    train, test = rows.where(F.col("Date") <= LAST_TRAINED), rows.where(F.col("Date") > LAST_TRAINED)
    model = TorchEstimator(
        model=lambda vocabulary: Forecast(vocabulary),
        loss=torch.nn.MSELoss(),
        optimizer=lambda weights: torch.optim.AdamW(weights, lr=0.003),
        lr_scheduler=lambda optimizer, steps: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps),
        feature_cols={"numbers": NUMBERS} | {name: name for name in WORDS},
        label_cols=["LogSales"],
        vocabulary=WORDS,  # learnt from the rows to train on
        unknown_words="keep",
        normalize=NUMBERS,
        batch_size=128,
        epochs=12,
        ranks=2,
    ).fit(train)

    usual = train.groupBy("Store", "DayOfWeek", "Promo").agg(F.avg("Sales").alias("usual"))
    scored = model.transform(test.join(F.broadcast(usual), ["Store", "DayOfWeek", "Promo"]))
    scored = scored.withColumn("forecast", F.exp("prediction")).cache()
    baseline, error = rmspe(scored, "usual"), rmspe(scored, "forecast")
    print(f"average of store, weekday and promotion: RMSPE {baseline:.3f} over the six weeks after the training")
    print(f"network on two ranks: RMSPE {error:.3f}")
    assert error < baseline
    draw(scored.where("Store = '3'").orderBy("Date").select("Date", "Sales", "usual", "forecast").toPandas())
    spark.stop()


if __name__ == "__main__":
    main()
