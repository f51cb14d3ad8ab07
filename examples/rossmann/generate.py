"""Write CSV files like those of Kaggle's Rossmann store sales, with the tables that fast.ai added, at any scale.

    python generate.py data                            # 1,115 stores × 942 days: 1,017,210 rows to train on
    python generate.py data --stores 20 --days 500     # a few seconds of training

The files have the names, columns and gaps of the real ones, so that features.py reads either. Sales follow a weekly and
a yearly season by type of store, promotions, holidays of the state, competition, weather and search trends, with noise
of 8 %: a forecast can be good, and not perfect. One seed gives one set of files. Needs NumPy and pyarrow.
"""

import argparse
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import csv

STATES = {  # name in weather.csv -> state; Bremen and Lower Saxony are one in the tables of stores and trends
    "BadenWuerttemberg": "BW",
    "Bayern": "BY",
    "Berlin": "BE",
    "Brandenburg": "BB",
    "Bremen": "HB",
    "Hamburg": "HH",
    "Hessen": "HE",
    "MecklenburgVorpommern": "MV",
    "Niedersachsen": "HB,NI",
    "NordrheinWestfalen": "NW",
    "RheinlandPfalz": "RP",
    "Saarland": "SL",
    "Sachsen": "SN",
    "SachsenAnhalt": "ST",
    "SchleswigHolstein": "SH",
    "Thueringen": "TH",
}
CODES = list(STATES.values())
WITH_STORES = {
    "NW": 26,
    "BY": 16,
    "SH": 10,
    "HE": 10,
    "BE": 8,
    "SN": 7,
    "BW": 6,
    "ST": 5,
    "RP": 4,
    "TH": 4,
    "HB,NI": 2,
    "HH": 2,
}
FIRST_DAY = np.datetime64("2013-01-01")
REFURBISHED = np.datetime64("2014-07-01"), np.datetime64("2014-12-31")  # one store in six has no rows in between
EVENTS = [None, "Rain", "Fog", "Fog-Rain", "Rain-Snow", "Snow", "Rain-Thunderstorm", "Fog-Snow"]


def easter(year):
    """Return Easter Sunday of a year (the algorithm of Meeus, Jones and Butcher)."""
    a, b, c = year % 19, year // 100, year % 100
    h = (19 * a + b - b // 4 - (b - (b + 8) // 25 + 1) // 3 + 15) % 30
    k = (32 + 2 * (b % 4) + 2 * (c // 4) - h - c % 4) % 7
    m = (a + 11 * h + 22 * k) // 451
    month, day = divmod(h + k - 7 * m + 114, 31)
    return np.datetime64(f"{year}-{month:02d}-{day + 1:02d}")


def holidays(days):
    """Return StateHoliday ("0", "a", "b" or "c") and whether it is a school holiday, both [states, days]."""
    state = np.full((len(CODES), len(days)), "0")
    school = np.zeros((len(CODES), len(days)), bool)
    everywhere = np.ones(len(CODES), bool)

    def among(*codes):
        return np.isin(CODES, codes)

    for year in range(days[0].astype(object).year - 1, days[-1].astype(object).year + 1):
        sunday = easter(year)
        public = [(f"{year}-{day}", everywhere) for day in ("01-01", "05-01", "10-03")]
        public += [(sunday + after, everywhere) for after in (39, 50)]
        public += [(sunday + 60, among("BW", "BY", "HE", "NW", "RP", "SL")), (f"{year}-01-06", among("BW", "BY", "ST"))]
        public += [(f"{year}-10-31", among("BB", "MV", "SN", "ST", "TH"))]
        public += [(f"{year}-11-01", among("BW", "BY", "NW", "RP", "SL"))]
        for day, where in public:
            state[np.ix_(where, days == np.datetime64(day))] = "a"
        state[:, np.isin(days, [sunday - 2, sunday + 1])] = "b"
        state[:, np.isin(days, np.array([f"{year}-12-25", f"{year}-12-26"], "datetime64[D]"))] = "c"
        for number in range(len(CODES)):
            summer = np.datetime64(f"{year}-06-22") + 3 * number  # states begin one after another
            autumn = np.datetime64(f"{year}-10-04") + number
            spans = [(sunday - 13, 18), (summer, 44), (autumn, 13), (np.datetime64(f"{year}-12-22"), 14)]
            for first, length in spans:
                school[number] |= (days >= first) & (days < first + length)
    return state, school & (weekday(days) < 6)


def weekday(days):
    """Return 1 for Monday to 7 for Sunday."""
    return (days.astype(int) + 3) % 7 + 1


def smooth(noise, width):
    """Return noise [n, days] as a moving average of `width` days, of the same variance."""
    kernel = np.ones(width) / np.sqrt(width)
    return np.stack([np.convolve(row, kernel, "same") for row in noise])


def stores_table(random, count):
    """Return store.csv, and the number of each store's state."""
    kind = random.choice(list("abcd"), count, p=[0.54, 0.02, 0.13, 0.31])
    opened_year = random.integers(1998, 2016, count)
    known = random.random(count) >= 0.318  # since when there is competition
    distance = np.maximum(20, np.round(np.exp(random.normal(7.7, 1.2, count)) / 10) * 10)
    promo2 = random.random(count) < 0.512
    intervals = random.choice(["Jan,Apr,Jul,Oct", "Feb,May,Aug,Nov", "Mar,Jun,Sept,Dec"], count, p=[0.59, 0.23, 0.18])
    table = {
        "Store": np.arange(1, count + 1),
        "StoreType": kind,
        "Assortment": random.choice(list("abc"), count, p=[0.53, 0.01, 0.46]),
        "CompetitionDistance": nulls(distance.astype(int), random.random(count) < 0.003),
        "CompetitionOpenSinceMonth": nulls(random.integers(1, 13, count), ~known),
        "CompetitionOpenSinceYear": nulls(opened_year, ~known),
        "Promo2": promo2.astype(int),
        "Promo2SinceWeek": nulls(random.integers(1, 51, count), ~promo2),
        "Promo2SinceYear": nulls(random.integers(2009, 2016, count), ~promo2),
        "PromoInterval": nulls(intervals, ~promo2),
    }
    share = np.array([WITH_STORES.get(code, 0) for code in CODES])
    return table, random.choice(len(CODES), count, p=share / share.sum())


def weather_tables(random, days):
    """Return weather.csv, and the mean temperature as [states, days]."""
    size = (len(CODES), len(days))
    year = 2 * np.pi * (days - FIRST_DAY).astype(int) / 365.25
    mean = (
        9.5 - 9 * np.cos(year - 0.3) + 3.5 * smooth(random.normal(size=size), 6) + random.normal(0, 1, (len(CODES), 1))
    )
    swing = 4 + 2 * random.random(size) - np.cos(year)
    humid = np.clip(76 + 8 * np.cos(year) + 7 * random.normal(size=size), 30, 98)
    wind = np.clip(13 + 4 * smooth(random.normal(size=size), 3), 2, 50)
    pressure = 1016 + 7 * smooth(random.normal(size=size), 5)
    visible = np.clip(13 + 5 * random.normal(size=size), 1, 31)
    events = random.choice(len(EVENTS), size, p=[0.25, 0.42, 0.11, 0.09, 0.05, 0.03, 0.03, 0.02])
    wet = np.isin(events, [1, 3, 4, 6])
    gone = random.random(size) < 0.024
    wide = {
        "Max_TemperatureC": mean + swing,
        "Mean_TemperatureC": mean,
        "Min_TemperatureC": mean - swing,
        "Dew_PointC": mean - 1,
        "MeanDew_PointC": mean - 4,
        "Min_DewpointC": mean - 7,
        "Max_Humidity": np.minimum(100, humid + 14),
        "Mean_Humidity": humid,
        "Min_Humidity": humid - 22,
        "Max_Sea_Level_PressurehPa": pressure + 3,
        "Mean_Sea_Level_PressurehPa": pressure,
        "Min_Sea_Level_PressurehPa": pressure - 3,
        "Max_VisibilityKm": nulls(visible + 9, gone),
        "Mean_VisibilityKm": nulls(visible, gone),
        "Min_VisibilitykM": nulls(visible / 2, gone),
        "Max_Wind_SpeedKm_h": wind + 11,
        "Mean_Wind_SpeedKm_h": wind,
        "Max_Gust_SpeedKm_h": nulls(wind + 35, random.random(size) < 0.77),
        "Precipitationmm": np.where(wet, random.exponential(2.5, size).round(2), 0.0),
        "CloudCover": nulls(random.integers(0, 9, size), random.random(size) < 0.074),
        "Events": pa.array([EVENTS[event] for event in events.ravel()]),
        "WindDirDegrees": random.integers(-1, 361, size),
    }
    table = {"file": np.repeat(list(STATES), len(days)), "Date": np.tile(days, len(CODES))}
    return table | {name: whole(name, values) for name, values in wide.items()}, mean


def whole(name, values):
    """Return values [states, days] as one column: whole numbers, as in the real file, but for the rain."""
    if isinstance(values, pa.Array):
        return values
    return values.ravel() if name == "Precipitationmm" else np.round(values).astype(int).ravel()


def trend_tables(random, days):
    """Return googletrend.csv, and the trend of each state's searches on each day, [states, days], about 0."""
    sundays = np.arange(FIRST_DAY - 30, days[-1] + 14, dtype="datetime64[D]")
    sundays = sundays[weekday(sundays) == 7]
    files = ["", "SN", "BY", "TH", "NW", "BE", "RP", "BW", "NI", "SH", "HE", "ST", "HH", "SL"]
    year = 2 * np.pi * (sundays - FIRST_DAY).astype(int) / 365.25
    waves = 60 + 8 * np.cos(year - 5.5) + 5 * smooth(random.normal(size=(len(files), len(sundays))), 4)
    trends = np.clip(np.round(waves), 0, 100).astype(int)
    weeks = [f"{sunday} - {sunday + 6}" for sunday in sundays]
    table = {
        "file": np.repeat(["_".join(filter(None, ("Rossmann_DE", code))) for code in files], len(weeks)),
        "week": np.tile(weeks, len(files)),
        "trend": trends.ravel(),
    }
    week = np.searchsorted(sundays, days, side="right") - 1
    row = [files.index(own) if (own := code.removeprefix("HB,")) in files else 0 for code in CODES]
    return table, (trends[row][:, week] - 60) / 20


def sales_tables(random, stores, state, days, last_train_day, temperature, trend):
    """Return train.csv and test.csv."""
    count, size = len(state), (len(state), len(days))
    state_holiday, school = (table[state] for table in holidays(days))
    of_week, kind = weekday(days), np.searchsorted(list("abcd"), stores["StoreType"])
    promo = (of_week <= 5) & ((days - FIRST_DAY).astype(int) // 7 % 2 == 0)
    on_sundays = (kind == 1)[:, None]
    is_open = np.where(of_week == 7, on_sundays, (state_holiday == "0") | on_sundays)

    season = 2 * np.pi * (days - FIRST_DAY).astype(int) / 365.25
    month = days.astype("datetime64[M]")
    before_christmas = np.exp(-(((month + 1).astype("datetime64[D]") - days).astype(int) + 7) / 12) * (
        month.astype(int) % 12 == 11
    )
    by_day = np.array([[0.24, 0.06, -0.03, -0.03, 0.04, -0.12, 0], [-0.2, -0.15, -0.15, -0.1, 0, 0.1, 0.35],
                       [0.2, 0.05, 0, 0, 0.05, -0.05, 0], [0.2, 0.06, -0.01, 0, 0.04, -0.25, 0]])  # fmt: skip
    log = random.normal(8.65, 0.32, count)[:, None] + np.array([0, 0.45, 0.02, -0.03])[kind][:, None]
    log = log + by_day[kind][:, of_week - 1] + random.normal(0.3, 0.08, count)[:, None] * promo
    log = (
        log
        + 0.05 * np.cos(season - 6.1)
        + 0.7 * before_christmas
        + random.normal(0, 0.02, count)[:, None] * np.sin(season)
    )
    log = log + 0.00007 * (days - FIRST_DAY).astype(int) + 0.04 * school + 0.03 * trend[state]
    log = log - 0.002 * np.abs(temperature[state] - 14) - competition(stores, days) + promo2_effect(stores, days)
    sales = np.round(np.exp(log + random.normal(0, 0.08, size))).astype(int) * is_open
    customers = np.round(sales / random.normal(9.2, 1, count).clip(6)[:, None]).astype(int)

    rows = {
        "Store": np.broadcast_to(stores["Store"][:, None], size),
        "DayOfWeek": np.broadcast_to(of_week, size),
        "Date": np.broadcast_to(days, size),
        "Sales": sales,
        "Customers": customers,
        "Open": is_open.astype(int),
        "Promo": np.broadcast_to(promo.astype(int), size),
        "StateHoliday": state_holiday,
        "SchoolHoliday": np.where(school, "1", "0"),
    }
    closed = np.arange(count) % 6.2 < 1  # 180 of 1,115
    absent = closed[:, None] & (days >= REFURBISHED[0]) & (days <= REFURBISHED[1])
    tested = np.broadcast_to((np.arange(count) % 4.3 < 3.3)[:, None], size)  # 856 of 1,115
    trained = days <= last_train_day
    train = newest_first(rows, trained & ~absent)
    test = newest_first(rows, ~trained & tested)
    test = {"Id": np.arange(1, len(test["Store"]) + 1)} | {
        n: v for n, v in test.items() if n not in ("Sales", "Customers")
    }
    unknown = (test["Store"] == test["Store"][len(test["Store"]) // 2]) & (test["DayOfWeek"] < 7)
    test["Open"] = nulls(test["Open"], unknown & (np.cumsum(unknown) <= 11))  # as in the real file, of one store
    return train, test


def competition(stores, days):
    """Return by how much a competitor takes away of the logarithm of sales, [stores, days]: more where it is near."""
    year, month, distance = (
        np.array(stores[f"Competition{name}"].fill_null(0)) for name in ("OpenSinceYear", "OpenSinceMonth", "Distance")
    )
    since = (year - 1970).astype("datetime64[Y]").astype("datetime64[M]") + np.maximum(month - 1, 0)
    open_ = (since.astype("datetime64[D]")[:, None] <= days) & (year > 0)[:, None]
    return 0.12 * np.exp(-distance / 3000)[:, None] * open_


def promo2_effect(stores, days):
    """Return by how much the second promotion raises the logarithm of sales in the months it begins, as above."""
    year = np.array(stores["Promo2SinceYear"].fill_null(9999))
    week = np.array(stores["Promo2SinceWeek"].fill_null(1))
    since = (np.minimum(year, 2100) - 1970).astype("datetime64[Y]").astype("datetime64[D]") + 7 * (week - 1)
    first = stores["PromoInterval"].fill_null("none").dictionary_encode()
    begins = np.array([{"Jan": 0, "Feb": 1, "Mar": 2}.get(text[:3], 0) for text in first.dictionary.to_pylist()])
    month = days.astype("datetime64[M]").astype(int) % 3
    return 0.05 * ((since[:, None] <= days) & (begins[np.array(first.indices)][:, None] == month))


def newest_first(rows, chosen):
    """Return these rows of columns [stores, days], by day from the last to the first, and by store."""
    chosen = chosen.T[::-1]
    return {name: values.T[::-1][chosen] for name, values in rows.items()}


def nulls(values, where):
    """Return the values as one column in which those are null."""
    values, where = np.asarray(values), np.asarray(where)
    if values.dtype.kind == "f":
        values = np.round(values).astype(int)
    return pa.array(values.ravel(), mask=where.ravel())


def write(folder, stores=1115, days=942, test_days=48, seed=0):
    """Write the seven files to a folder, and return the number of rows of train.csv."""
    random = np.random.default_rng(seed)
    dates = FIRST_DAY + np.arange(days + test_days)
    store, state = stores_table(random, stores)
    weather, temperature = weather_tables(random, dates)
    googletrend, trend = trend_tables(random, dates)
    train, test = sales_tables(random, store, state, dates, dates[days - 1], temperature, trend)
    files = {
        "train": train,
        "test": test,
        "store": store,
        "store_states": {"Store": store["Store"], "State": np.array(CODES)[state]},
        "state_names": {"StateName": list(STATES), "State": CODES},
        "weather": weather,
        "googletrend": googletrend,
    }
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, table in files.items():
        csv.write_csv(pa.table(table), Path(folder, f"{name}.csv"))
    return len(train["Store"])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--stores", type=int, default=1115)
    parser.add_argument("--days", type=int, default=942, help="from 2013-01-01 on; those of the test come after them")
    parser.add_argument("--test-days", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(f"{write(**vars(options)):,} rows to train on in {options.folder}/train.csv")


if __name__ == "__main__":
    main()
