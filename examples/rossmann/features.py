"""The features of Rossmann's sales by Spark SQL, from Kaggle's CSV files or those of generate.py.

`prepare` reads the seven files and returns a `Prepared`: a row for each store and day on which something was sold, with
the logarithm of its sales, and a row for each store and day of the test. Categorical columns are strings, continuous
ones floats, and nothing is null. `indexed` replaces the strings by their indices in a vocabulary, for a library that
wants numbers.
"""

from dataclasses import dataclass, replace
from datetime import date, timedelta
from typing import Any

from pyspark.ml.feature import StringIndexer
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

EVENTS = ["Promo", "StateHoliday", "SchoolHoliday"]
CATEGORICAL = [
    *("Store", "State", "DayOfWeek", "Year", "Month", "Day", "Week", "StoreType", "Assortment", *EVENTS),
    *("PromoInterval", "Promo2SinceYear", "Promo2Weeks", "CompetitionOpenSinceYear", "CompetitionMonthsOpen", "Events"),
]
WEATHER = [
    *(f"{which}_{what}" for what in ("TemperatureC", "Humidity") for which in ("Max", "Mean", "Min")),
    *("Max_Wind_SpeedKm_h", "Mean_Wind_SpeedKm_h", "CloudCover"),
]
ELAPSED = [f"{way}{event}" for event in EVENTS for way in ("After", "Before")]
CONTINUOUS = ["CompetitionDistance", *WEATHER, "trend", "trend_de", *ELAPSED]

STORE_DAY = {
    **{"Store": "int", "DayOfWeek": "int", "Date": "date", "Open": "int", "Promo": "int"},
    **{"StateHoliday": "string", "SchoolHoliday": "int"},
}
COLUMNS = {  # file -> the columns that are read of it
    "train": {**STORE_DAY, "Sales": "int"},
    "test": {**STORE_DAY, "Id": "int"},
    "store": {
        **{"Store": "int", "StoreType": "string", "Assortment": "string", "CompetitionDistance": "float"},
        **{"CompetitionOpenSinceMonth": "int", "CompetitionOpenSinceYear": "int"},
        **{"Promo2SinceWeek": "int", "Promo2SinceYear": "int", "PromoInterval": "string"},
    },
    "store_states": {"Store": "int", "State": "string"},
    "state_names": {"StateName": "string", "State": "string"},
    "weather": {"file": "string", "Date": "date", **dict.fromkeys(WEATHER, "float"), "Events": "string"},
    "googletrend": {"file": "string", "week": "string", "trend": "float"},
}


@dataclass(frozen=True)
class Prepared:
    """What is trained on, and what is to be predicted."""

    train: DataFrame
    """The features, `Sales` as a logarithm, `Validation` (bool), `Date`."""
    test: DataFrame
    """The features, `Id`, `Open` (whether the store is open), `Date`."""
    max_sales: int
    """The most that a store has sold in a day."""
    vocabulary: dict[str, list[str]] | None = None
    """Categorical column -> its words, where they are replaced by their indices."""


def load(spark: Any, folder: str) -> dict[str, DataFrame]:
    """Return the tables by the names of their files, with typed columns. `folder` is a path that Spark can read."""
    tables = {}
    for name, columns in COLUMNS.items():
        table = spark.read.csv(f"{folder}/{name}.csv", header=True)
        if missing := columns.keys() - set(table.columns):
            raise ValueError(f"{folder}/{name}.csv has no column {', '.join(sorted(missing))}.")
        tables[name] = table.select(*(F.col(column).cast(kind) for column, kind in columns.items()))
    return tables


def prepare(spark: Any, folder: str, sample: float | None = None) -> Prepared:
    """Return the features of the files in `folder`; with `sample`, of this share of the rows to train on."""
    tables = load(spark, folder)
    # Promotions and holidays go on from the last day to train on to the first of the test: both are one table.
    rows = tables["train"].unionByName(tables["test"], allowMissingColumns=True)
    rows = rows.withColumns({name: F.col(name).cast("string") != "0" for name in EVENTS})
    rows = rows.withColumns({name: column for event in EVENTS for name, column in elapsed(event).items()})
    # The small tables are broadcast: only the windows above move rows. A left join loses none.
    rows = rows.join(F.broadcast(store_table(tables)), "Store", "left")
    rows = rows.join(F.broadcast(weather_table(tables)), ["State", "Date"], "left")
    rows = rows.withColumn("Sunday", F.date_sub("Date", F.dayofweek("Date") - 1))  # on which a week of Google's begins
    rows = rows.join(F.broadcast(trend_table(tables)), ["State", "Sunday"], "left")
    rows = rows.withColumns(calendar()).withColumns(competition()).withColumns(second_promotion())
    words = {name: F.coalesce(F.col(name).cast("string"), F.lit("none")) for name in CATEGORICAL}
    numbers = {name: F.coalesce(F.col(name).cast("float"), F.lit(0).cast("float")) for name in CONTINUOUS}
    rows = rows.withColumns(words | numbers).cache()

    sold, asked = F.col("Sales") > 0, F.col("Id").isNotNull()  # a day without sales is not scored
    first, last, earliest, latest, most = rows.agg(
        *(of(F.when(part, F.col("Date"))) for part in (asked, sold) for of in (F.min, F.max)), F.max("Sales")
    ).first()
    validation = F.col("Date").between(*validation_days(first, last, earliest, latest))
    train = rows.where(sold).withColumns({"Validation": validation, "Sales": F.log("Sales").cast("float")})
    train = train.select(*CATEGORICAL, *CONTINUOUS, "Sales", "Validation", "Date")
    test = rows.where(asked).withColumn("Open", F.coalesce("Open", F.lit(1)) != 0)
    test = test.select(*CATEGORICAL, *CONTINUOUS, "Id", "Open", "Date")
    return Prepared(train if sample is None else train.sample(sample, seed=0), test, most)


def indexed(prepared: Prepared) -> Prepared:
    """Return it with integers in the categorical columns: the index of a string among those of both tables."""
    both = prepared.train.select(CATEGORICAL).union(prepared.test.select(CATEGORICAL))
    numbers = [f"{name}_index" for name in CATEGORICAL]
    indexer = StringIndexer(inputCols=CATEGORICAL, outputCols=numbers, stringOrderType="alphabetAsc").fit(both)

    def replaced(frame: DataFrame) -> DataFrame:
        columns = {name: F.col(number).cast("int") for name, number in zip(CATEGORICAL, numbers, strict=True)}
        return indexer.transform(frame).withColumns(columns).drop(*numbers)

    vocabulary = {name: list(words) for name, words in zip(CATEGORICAL, indexer.labelsArray, strict=True)}
    return replace(prepared, train=replaced(prepared.train), test=replaced(prepared.test), vocabulary=vocabulary)


def elapsed(event: str) -> dict[str, Column]:
    """Return the days since a store's last day of the event, and those to its next, as a negative number.

    Both are 0 on a day of the event. Before the first one, days count from the store's first row; after the last one,
    to its last.
    """
    columns = {}
    for way, order in (("After", F.asc("Date")), ("Before", F.desc("Date"))):  # to look ahead, Spark is slow: O(n²)
        window = Window.partitionBy("Store").orderBy(order).rowsBetween(Window.unboundedPreceding, Window.currentRow)
        latest = F.last(F.when(F.col(event), F.col("Date")), ignorenulls=True).over(window)
        columns[f"{way}{event}"] = F.date_diff("Date", F.coalesce(latest, F.first("Date").over(window)))
    return columns


def store_table(tables: dict[str, DataFrame]) -> DataFrame:
    """Return what is known of each store, with its state."""
    return tables["store"].join(tables["store_states"], "Store", "left")


def weather_table(tables: dict[str, DataFrame]) -> DataFrame:
    """Return the weather by state and day."""
    names = tables["state_names"].withColumnRenamed("StateName", "file")
    return tables["weather"].join(F.broadcast(names), "file").drop("file")


def trend_table(tables: dict[str, DataFrame]) -> DataFrame:
    """Return how much was searched for in each state, and in all of Germany, by the Sunday that a week begins on."""
    state = F.regexp_extract("file", "Rossmann_DE_(.*)", 1)
    state = F.when(state == "NI", "HB,NI").otherwise(state)  # as the other tables call it
    weeks = tables["googletrend"].select(
        state.alias("State"), F.left("week", F.lit(10)).cast("date").alias("Sunday"), "trend"
    )
    germany = weeks.where("State = ''").select("Sunday", F.col("trend").alias("trend_de"))
    return weeks.where("State != ''").join(F.broadcast(germany), "Sunday")


def calendar() -> dict[str, Column]:
    """Return the parts of the date."""
    parts = {"Year": F.year, "Month": F.month, "Day": F.dayofmonth, "Week": F.weekofyear}
    return {name: part("Date") for name, part in parts.items()}


def competition() -> dict[str, Column]:
    """Return for how many months a competitor has been open, at most 24; 0 where nobody knows."""
    opened = F.make_date("CompetitionOpenSinceYear", "CompetitionOpenSinceMonth", F.lit(15))
    return {"CompetitionMonthsOpen": periods(F.date_diff("Date", opened), length=30, most=24)}


def second_promotion() -> dict[str, Column]:
    """Return for how many weeks the store has taken part in Promo2, at most 25; 0 where it does not."""
    first_week = F.trunc(F.make_date("Promo2SinceYear", F.lit(1), F.lit(4)), "week")  # 4 January is in week 1
    began = F.date_add(first_week, (F.col("Promo2SinceWeek") - 1) * 7)
    return {"Promo2Weeks": periods(F.date_diff("Date", began), length=7, most=25)}


def periods(days: Column, length: int, most: int) -> Column:
    """Return how many whole periods of `length` days these are, from 0 to `most`; 0 for null."""
    whole = F.greatest(F.lit(0), F.least(F.lit(most), F.floor(days / length)))  # neither takes a null for the least
    return F.when(days.isNull(), 0).otherwise(whole).cast("int")


def validation_days(first: date, last: date, earliest: date, latest: date) -> tuple[date, date]:
    """Return the first and last day to validate on: those of the test, first to last, a year before.

    Where the days to train on, earliest to latest, don't reach back so far: as many, the latest of them.
    """
    back = timedelta(365) if first - timedelta(365) > earliest else last - latest
    return first - back, last - back


def write_submission(scored: DataFrame, path: str) -> int:
    """Write `Id,Sales` from the logarithms in `Sales_output` to a local file; returns the number of rows."""
    sales = F.when(F.col("Open"), F.exp("Sales_output")).otherwise(0.0)  # a closed store sells nothing
    rows = scored.select("Id", sales.alias("Sales")).orderBy("Id").toPandas()
    rows.to_csv(path, index=False)
    return len(rows)
