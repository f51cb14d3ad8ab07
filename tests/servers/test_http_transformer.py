"""A DataFrame that calls a web service: each kind of trouble, and how many requests it costs."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PythonException
from pyspark.ml import PipelineModel
from pyspark.sql import functions as F

import tritium as tr
from tritium.errors import BadData, BadFunction, BadSetting, ScoringFailed

from . import web_service


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with web_service.running() as url:
        yield url


@pytest.fixture(autouse=True)
def _from_zero(url: str) -> None:
    web_service.counted(url)


def doubled(url: str, **settings: Any) -> Any:
    settings = {
        "request": lambda row: {"x": row["x"]},
        "response": lambda answer: answer.json()["y"],
        "returns": "bigint",
        "backoff": 0.01,
        **settings,
    }
    return tr.http_transformer(url=url, **settings)


def numbers(spark: Any, count: int = 20, partitions: int = 2) -> Any:
    return spark.range(0, count, 1, partitions).select(F.col("id").alias("x"), F.lit("other").alias("text"))


def values(df: Any) -> list[Any]:
    return [row.response for row in by_x(df)]


def by_x(df: Any) -> list[Any]:
    """Return the rows in order. Spark's orderBy would sample them first, and call the service twice."""
    return sorted(df.collect(), key=lambda row: row.x)


EXPECTED = [2 * x for x in range(20)]


def test_each_row_is_one_request(spark: Any, url: str) -> None:
    scored = doubled(f"{url}/plain").transform(numbers(spark))
    assert scored.columns == ["x", "text", "response"]
    assert scored.schema["response"].dataType.simpleString() == "bigint"
    assert values(scored.where("response >= 0")) == EXPECTED
    assert web_service.counted(url)["counts"]["plain"] == 20


@pytest.mark.parametrize(
    ("path", "settings", "requests"),
    [
        ("busy", {}, 22),  # two are refused, with Retry-After
        ("broken", {}, 40),
        ("cut", {}, 40),
        ("slow", {"timeout": 0.5, "concurrency": 16}, 40),
        ("token", {"headers": "tokens", "concurrency": 1}, 22),  # one in each task is refused
    ],
)
def test_trouble_that_passes(spark: Any, url: str, path: str, settings: dict[str, Any], requests: int) -> None:
    if "headers" in settings:
        settings = {**settings, "headers": renewed()}
    assert values(doubled(f"{url}/{path}", **settings).transform(numbers(spark))) == EXPECTED
    counted = web_service.counted(url)
    assert counted["counts"][path] == requests
    if path == "busy":
        assert max(counted["times"]) - min(counted["times"]) >= 1  # what Retry-After says


def renewed() -> Any:
    tokens: list[int] = []

    def headers() -> dict[str, str]:
        tokens.append(1)
        return {"Authorization": f"Bearer token-{len(tokens)}"}

    return headers


@pytest.mark.parametrize(
    ("path", "settings", "error", "requests"),
    [
        ("always-broken", {"retries": 2}, '503 Service Unavailable: "down" (3 attempts)', 22),
        ("missing", {}, "404 Not Found: \"nothing here for \"", 20),
        ("words", {}, "response= returned 'three' (str), which is no int64", 20),
        ("plain", {"response": lambda answer: answer.json()["z" * (answer.json()["y"] == 6) or "y"]},
         "response= raised KeyError: 'zzz'", 20),
        ("plain", {"request": lambda row: {"x": 6 // (row["x"] != 3 and 1) and row["x"]}},
         "request= raised ZeroDivisionError", 19),
        ("plain", {"request": lambda row: {"x": row["x"] if row["x"] != 3 else {1}}}, "the request can't be made", 19),
    ],
)  # fmt: skip
def test_trouble_that_stays(
    spark: Any, url: str, path: str, settings: dict[str, Any], error: str, requests: int
) -> None:
    rows = by_x(doubled(f"{url}/{path}", on_error="column", **settings).transform(numbers(spark)))
    assert [row.response for row in rows] == [*EXPECTED[:3], None, *EXPECTED[4:]]
    assert [row.x for row in rows if row.response_error is not None] == [3]
    assert error.replace("zzz", "z") in rows[3].response_error
    assert web_service.counted(url)["counts"][path] == requests
    nulls = doubled(f"{url}/{path}", on_error="null", **settings).transform(numbers(spark))
    assert values(nulls) == [*EXPECTED[:3], None, *EXPECTED[4:]]
    with pytest.raises(PythonException, match="RequestFailed") as failed:
        doubled(f"{url}/{path}", **settings).transform(numbers(spark)).collect()
    assert f"{url}/{path} gave no value for row 3 of partition 0" in str(failed.value)


def test_nobody_listens(spark: Any) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # without listen()
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        rows = doubled(url, on_error="column", retries=1).transform(numbers(spark, 2)).collect()
    assert all("ConnectError" in row.response_error and "(2 attempts)" in row.response_error for row in rows)


def test_a_long_retry_after_ends_the_attempts(spark: Any, url: str) -> None:
    rows = doubled(f"{url}/closed", on_error="column").transform(numbers(spark, 2)).collect()
    assert all("asks to wait 86400 s, and max_backoff is 60 s" in row.response_error for row in rows)
    assert web_service.counted(url)["counts"]["closed"] == 2


def test_the_rate_is_that_of_all_tasks(spark: Any, url: str) -> None:
    scored = doubled(f"{url}/plain", rate=40).transform(numbers(spark, 40, partitions=8))
    assert scored.select("response").distinct().count() == 40
    times = sorted(web_service.counted(url)["times"])
    assert len(times) == 40
    assert times[-1] - times[0] >= 0.9  # 20 of each of two tasks at 20 a second, or later


def test_requests_at_once(spark: Any, url: str) -> None:
    df = numbers(spark, 60, partitions=4)
    assert len(doubled(f"{url}/takes-time", concurrency=5, tasks=1).transform(df).collect()) == 60
    assert 1 < web_service.counted(url)["most"] <= 5


def test_no_more_than_so_many_requests(spark: Any, url: str) -> None:
    df = numbers(spark, 60, partitions=4)
    rows = doubled(f"{url}/broken", max_requests=41, tasks=2, on_error="column").transform(df).collect()
    assert web_service.counted(url)["counts"]["broken"] == 40
    assert sum(row.response is not None for row in rows) <= 20
    assert any("this task's share of max_requests is 20" in (row.response_error or "") for row in rows)


def test_a_limit_calls_for_few_rows(spark: Any, url: str) -> None:
    """Spark's worker sends results on when it has 64 KiB of them."""
    service = doubled(f"{url}/takes-time", concurrency=4, response=lambda answer: "x" * 1000, returns="string")
    assert len(service.transform(numbers(spark, 4000, 1)).limit(5).collect()) == 5
    assert web_service.counted(url)["counts"]["takes-time"] < 400


def test_a_table_of_files(spark: Any, url: str, tmp_path: Path) -> None:
    numbers(spark, 3000).write.parquet(str(tmp_path / "rows"))
    scored = doubled(f"{url}/plain", input_cols=["x"], concurrency=4).transform(
        spark.read.parquet(str(tmp_path / "rows"))
    )
    assert scored.where("response != 2 * x OR response IS NULL OR text != 'other'").count() == 0
    assert web_service.counted(url)["counts"]["plain"] == 3000


def test_what_is_answered_is_not_asked_again(spark: Any, url: str, tmp_path: Path) -> None:
    service = doubled(f"{url}/once-missing", rate=1000)
    scoring = {"into": f"parquet:{tmp_path / 'scored'}", "resume": str(tmp_path / "resume"), "verbose": False}
    df = numbers(spark, 20, partitions=10)
    with pytest.raises(ScoringFailed, match="once-missing gave no value for row") as failed:
        service.score(df, **scoring)
    done = service.score(df, **scoring)
    assert done.rows == 20
    assert done.kept == failed.value.finished
    assert values(spark.read.parquet(str(tmp_path / "scored"))) == EXPECTED
    counts = web_service.counted(url)["counts"]
    assert counts["once-missing 3"] == 2
    assert counts["once-missing"] < 40
    with pytest.raises(BadSetting, match="code of request and response"):
        doubled(f"{url}/once-missing", request=lambda row: {"x": -row["x"]}).score(df, **scoring)
    with pytest.raises(BadSetting, match="max_requests= counts for one job"):
        doubled(url, max_requests=3).score(df, **scoring)


def test_a_stream_in_a_pipeline(spark: Any, url: str, tmp_path: Path) -> None:
    numbers(spark).write.parquet(str(tmp_path / "rows"))
    stream = spark.readStream.schema("x long, text string").parquet(str(tmp_path / "rows"))
    scored = PipelineModel([doubled(f"{url}/plain")]).transform(stream)
    query = scored.writeStream.format("memory").queryName("called").trigger(availableNow=True).start()
    query.awaitTermination()
    assert values(spark.table("called")) == EXPECTED
    assert web_service.counted(url)["counts"]["plain"] == 20


def test_other_methods_and_types(spark: Any, url: str) -> None:
    def request(row: dict[str, Any]) -> dict[str, Any]:
        return {"method": "PUT", "url": f"{url}/plain", "json": {"x": row["x"]}, "headers": {"X-Row": str(row["x"])}}

    scored = tr.http_transformer(
        url=url, request=request, response=lambda answer: answer.json(), returns="struct<y: double>", output_col="z"
    ).transform(numbers(spark, 3))
    assert [row.z.y for row in by_x(scored)] == [0, 2, 4]
    text = tr.http_transformer(url=f"{url}/plain", request=lambda row: '{"x": 4}').transform(numbers(spark, 1))
    assert text.first().response == '{"y": 8}'


def test_secrets_stay_on_the_executors(spark: Any, url: str, capfd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def headers() -> dict[str, str]:
        return {"Authorization": f"Bearer {os.environ['HOME']}-hidden"}

    secret = f"{os.environ['HOME']}-hidden"
    service = doubled(f"{url}/missing?api_key=abcdef", headers=headers, on_error="column")
    scored = service.transform(numbers(spark))
    error = scored.where("x = 3").first().response_error
    assert "nothing here for Bearer ***" in error or "nothing here for ***" in error
    with pytest.raises(PythonException) as failed:
        doubled(f"{url}/missing?api_key=abcdef", headers={"Authorization": secret}).transform(numbers(spark)).collect()
    plan = scored._jdf.queryExecution().toString()
    for text in (error, plan, repr(service), str(failed.value), *capfd.readouterr()):
        assert secret not in text
        assert "abcdef" not in text


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"url": "example.com"}, BadSetting, "begins with http"),
        ({"on_error": "skip"}, BadSetting, "on_error='skip'"),
        ({"concurrency": 0}, BadSetting, "concurrency=0"),
        ({"retries": -1}, BadSetting, "retries=-1"),
        ({"timeout": 0}, BadSetting, "timeout=0"),
        ({"rate": 0}, BadSetting, "rate=0"),
        ({"tasks": 1.5}, BadSetting, "tasks=1.5"),
        ({"request": "body"}, BadFunction, "request='body' is no function"),
        ({"response": 1}, BadFunction, "response=1 is no function"),
        ({"returns": "interval day"}, BadSetting, "a service's value is one of"),
        ({"input_cols": ["tex"]}, BadData, "no column 'tex'. Did you mean 'text'"),
        ({"output_col": "Text"}, BadData, "has a column 'Text' already"),
        ({"request": lambda row, lock=socket.socket: lock and __import__("threading").Lock()}, None, ""),
    ],
)
def test_settings_that_can_not_work(spark: Any, settings: dict[str, Any], error: Any, text: str) -> None:
    if error is None:
        import threading

        lock = threading.Lock()
        settings, error, text = {"request": lambda row: lock}, BadFunction, "can't go to the executors"
    with pytest.raises(error, match=text.replace("(", r"\(")):
        doubled(**{"url": "http://127.0.0.1", **settings}).transform(numbers(spark))
