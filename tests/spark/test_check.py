"""Rows unlike those of the training, counted while they are scored."""

from __future__ import annotations

import queue
import warnings
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import tritium as tr
from tritium.errors import BadSetting, SignatureMismatch, TritiumWarning

ROWS = pd.DataFrame({"temp": [0.0, 1.0, 0.5, 0.2], "hum": [1.0, 2.0, 3.0, 4.0]})
OTHER = pd.DataFrame({"temp": [0.5, 1.5, -1.0, 0.1], "hum": [1.0, 9.0, None, 2.0]})
COUNTS = (4, {"temp": 0, "hum": 1}, {"temp": 2, "hum": 1})
WORDS = (
    "4 rows scored: 'temp' is outside 0 to 1 in 2 (50.0%); 'hum' is outside 1 to 4 in 1 (25.0%); "
    "'hum' is null in 1 (25.0%), and was in 0.0%."
)


def counted(checks: Any) -> tuple[Any, ...]:
    return checks.rows, checks.nulls, checks.outside


def model_of(df: Any) -> tr.Model:
    model = tr.Model(torch.nn.Linear(2, 1), example=ROWS)
    model.learn_ranges(df)
    return model


def test_counts_of_a_batch_and_of_pandas(spark: Any, tmp_path: Path) -> None:
    model = model_of(spark.createDataFrame(ROWS))
    assert model.signature.ranges == {
        "temp": {"nulls": 0.0, "range": [0.0, 1.0]},
        "hum": {"nulls": 0.0, "range": [1.0, 4.0]},
    }
    assert model_of(ROWS).signature == model.signature
    model.save(str(tmp_path / "model"))
    loaded = tr.load(str(tmp_path / "model"))
    assert loaded.signature == model.signature
    transformer = loaded.transformer(check="count", on_error="null")
    df = spark.createDataFrame(
        [tuple(None if v != v else v for v in row) for row in OTHER.to_numpy().tolist()], "temp double, hum double"
    )
    scored = transformer.transform(df)
    assert scored.columns == ["temp", "hum", "prediction"]
    assert scored.where("prediction IS NULL").count() == 1
    assert counted(transformer.checks()) == COUNTS
    assert str(transformer.checks()) == WORDS
    transformer.transform(OTHER)
    assert counted(transformer.checks()) == COUNTS
    transformer.transform(spark.createDataFrame(ROWS)).collect()
    assert str(transformer.checks()) == "4 rows scored: all as at the training."


def test_a_stream(spark: Any, tmp_path: Path) -> None:
    spark.createDataFrame(OTHER.fillna(2.0)).write.parquet(str(tmp_path / "rows"))
    transformer = model_of(ROWS).transformer(check="count")
    stream = spark.readStream.schema("temp double, hum double").parquet(str(tmp_path / "rows"))
    query = transformer.transform(stream).writeStream.format("noop").trigger(availableNow=True).start()
    query.awaitTermination()
    assert counted(transformer.checks(query)) == (4, {"temp": 0, "hum": 0}, {"temp": 2, "hum": 1})


def test_words_and_arrays(spark: Any) -> None:
    from tritium.model.signature import Input, Output, Signature

    word = Input(
        "city", ("city",), "int64", (), ("string",), {"vocabulary": ["Rome", "Oslo"], "unknown": True, "kind": "fixed"}
    )
    array = Input("photo", ("photo",), "float32", (2,), ("number",), {"depth": 1, "kind": "fixed"})

    class Net(torch.nn.Module):
        def forward(self, city: torch.Tensor, photo: torch.Tensor) -> torch.Tensor:
            return city + photo.sum(1)

    model = tr.Model(Net(), Signature((word, array), (Output("y"),)))
    df = spark.createDataFrame([("Rome", [1.0, 2.0]), ("Lima", [0.5, 9.0])], "city string, photo array<float>")
    model.learn_ranges(df.limit(1))
    assert model.signature.ranges["photo"]["range"] == [1.0, 2.0]
    assert "range" not in model.signature.ranges["city"]
    transformer = model.transformer(check="count")
    transformer.transform(df).collect()
    checks = transformer.checks()
    assert (checks.outside, checks.unknown) == ({"photo": 1}, {"city": 1})
    assert "'city' has a word that the training did not have in 1 (50.0%)" in str(checks)
    transformer.transform(df.toPandas())
    assert transformer.checks() == checks


def test_a_warning_after_the_action(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    transformer = model_of(ROWS).transformer(check="warn", on_error="null")
    with pytest.warns(TritiumWarning, match="'temp' is outside 0 to 1 in 2"):
        transformer.transform(OTHER)
    said: list[str] = []
    monkeypatch.setattr(warnings, "warn", lambda text, *_, **__: said.append(text))
    scored = transformer.transform(spark.createDataFrame(OTHER.fillna(2.0)))
    (waiting,) = [thread for thread in threading.enumerate() if thread.name == "tritium-check"]
    assert not said
    scored.collect()
    waiting.join(30)
    assert ["'temp' is outside 0 to 1 in 2 (50.0%)" in text for text in said] == [True]


def test_a_stream_warns_of_each_column_once(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: queue.Queue[str] = queue.Queue()
    monkeypatch.setattr(warnings, "warn", lambda text, *_, **__: said.put(text))
    source = tmp_path / "source"
    source.mkdir()
    stream = spark.readStream.schema("temp double, hum double").json(str(source))
    transformer = model_of(ROWS).transformer(check="warn", on_error="null")
    query = transformer.transform(stream).writeStream.format("noop").start()
    for name, temp, hum in (("0", 0.5, 2.0), ("1", 7.0, 2.0), ("2", 8.0, 2.0), ("3", 9.0, 9.0)):
        Path(source, f".{name}").write_text(f'{{"temp": {temp}, "hum": {hum}}}')
        Path(source, f".{name}").rename(source / name)
        query.processAllAvailable()
    first, second = said.get(timeout=60), said.get(timeout=60)
    query.stop()
    assert "Micro-batch 1, 1 rows scored: 'temp' is outside 0 to 1 in 1 (100.0%)." in first
    assert "Micro-batch 3, 1 rows scored: 'hum' is outside 1 to 4 in 1 (100.0%)." in second
    assert said.empty()


def test_bad_input(spark: Any) -> None:
    df = spark.createDataFrame(ROWS)
    unlearnt = tr.Model(torch.nn.Linear(2, 1), example=ROWS)
    for data in (df, ROWS):
        with pytest.raises(BadSetting, match=r"model\.learn_ranges\(train_df\)"):
            unlearnt.transform(data, check="count")
    with pytest.raises(BadSetting, match="check='on'"):
        unlearnt.transform(df, check="on")
    with pytest.raises(BadSetting, match="has transformed with check='count'"):
        unlearnt.transformer().checks()
    with pytest.raises(SignatureMismatch, match="missing column 'hum'"):
        model_of(ROWS).transform(df.drop("hum"), check="count")
