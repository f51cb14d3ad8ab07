"""A small version of each benchmark: it runs, and what the systems of this environment compute agrees.

The peers that need environments of their own are not here: `make bench` makes those.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import lightgbm  # noqa: F401 - with scikit-learn, which sets environment variables
import pyspark.cloudpickle
import pytest
from pyspark.sql import functions as F

PICKLERS = (cloudpickle, pyspark.cloudpickle)  # pyspark has its own copy
ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (ROOT / "benchmarks", ROOT / "benchmarks" / "systems")


@pytest.fixture(autouse=True)
def _modules() -> Iterator[None]:
    """Make the benchmarks' modules importable, and pickled by value for Spark's workers; undo both afterwards."""
    there, path = set(sys.modules), sys.path[:]
    sys.path[:0] = map(str, FOLDERS)
    for name in ("work", "launching", "first_step_tritium", "scoring", "imaging"):
        module(name)
    yield
    for pickler in PICKLERS:
        for name in pickler.list_registry_pickle_by_value():
            pickler.unregister_pickle_by_value(sys.modules[name])
    sys.path[:] = path
    for name in set(sys.modules) - there:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(FOLDERS[0])):
            del sys.modules[name]


def module(name: str) -> Any:
    """Return a module of the benchmarks."""
    found = importlib.import_module(name)
    for pickler in PICKLERS:
        pickler.register_pickle_by_value(found)
    return found


def script(name: str, *arguments: object) -> list[str]:
    """Return the lines that a benchmark prints, in a process of its own."""
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *map(str, arguments)]
    done = subprocess.run(command, env={**os.environ}, capture_output=True, text=True, check=False, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_train(spark: Any) -> None:
    work = module("work")
    frame = work.make_frame(spark, 16_384)
    found = {name: module(name).fit(frame, 1) for name in ("tritium_launch", "tritium_estimator")}
    assert {fitted.rows for fitted in found.values()} == {16_384}
    errors = {name: work.mean_squared_error(fitted.layers) for name, fitted in found.items()}
    assert max(errors.values()) < 1.2 * min(errors.values()), errors


def test_launch(spark: Any) -> None:
    launching = module("launching")
    for name in ("on_spark", "on_driver"):
        launch = getattr(module("launch_tritium"), name)
        assert [launch(launching.nothing), launch(launching.group)] == [1, 2]


def test_first_step(spark: Any) -> None:
    found = module("first_step_tritium").measure(spark, 4_096, "stream")
    assert all(found[name] > 0 for name in ("seconds", "read", "import")), found


def test_inference(spark: Any, tmp_path: Path) -> None:
    module("scoring").write(str(tmp_path / "rows"), 2_000, spark)
    frame = spark.read.parquet(str(tmp_path / "rows" / "array"))
    names = ("score_tritium", "score_batch_udf", "score_map_in_pandas")
    means = {name: module(name).transform(frame).agg(F.mean("prediction")).first()[0] for name in names}
    assert max(means.values()) - min(means.values()) < 1e-6, means


def test_images(spark: Any, tmp_path: Path) -> None:
    module("imaging").write(str(tmp_path / "images"), 200)
    frame = spark.read.parquet(str(tmp_path / "images"))
    _, images, total = module("images_tritium").read(frame)
    _, alone, same = module("images_ideal").take([str(file) for file in (tmp_path / "images").iterdir()])
    assert (images, total) == (alone, same)
    assert images == 200


def test_exchange(spark: Any, tmp_path: Path) -> None:
    exchange = module("exchange")
    for kind, (data, megabytes) in exchange.sources(spark, str(tmp_path), 500, exchange.KINDS).items():
        runs = exchange.sides(spark, data, kind)
        for name in ("full", "stream") if kind == "array" else ("full",):
            assert sum(runs[name]()) == data.frame.count(), (kind, name)
        assert megabytes > 0


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("batch", ["--rows", 20_000, "--rounds", 1]),
        ("control", [2]),
        ("receive", ["--rows", 20_000]),
        ("timeline", ["--turns", 20]),
        ("scale", ["--rows", "--ranks", 2, "--times", 1, "--gang", 16, "--seconds", 1]),
    ],
)
def test_without_spark(name: str, arguments: list[object]) -> None:
    assert script(name, *arguments)


def test_memory(spark: Any) -> None:
    found = module("memory").measure(spark, 20_000, "full")
    assert found["rows"] == 20_000
    assert all(peak["private"] > 0 for peak in found["peaks"].values()), found


def test_the_page_is_made_of_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, suite = module("_page"), module("_suite")
    run = {"seconds": 2.0, "loop": 1.0, "mse": 0.1, "versions": {"torch": "1"}}
    sides = {name: lambda: dict(run) for name in ("ideal", "Tritium, launch", "petastorm")}

    def broken() -> dict[str, Any]:
        raise RuntimeError("it did not start")

    systems = suite.in_turn({**sides, "Ray Data + Train": broken}, dict.fromkeys([*sides, "Ray Data + Train"], 2))
    assert [len(runs) for runs in systems.values()] == [2, 2, 2, 1]
    monkeypatch.setattr(suite, "RESULTS", tmp_path)
    monkeypatch.setattr(suite, "ROOT", tmp_path.parent)
    suite.save("train", {"rows": 10, "epochs": 1, "systems": systems, "memory": {}})
    text = page.text(page.results())
    assert "launch: DataFrame → model, warm session, of the ideal" not in text, "a goal that is met"
    assert "faster than the best peer (petastorm) | ≥ 1.5 × | 1.00 × |" in text
    assert "| 1.00 × | petastorm 1.00 ×, Ray Data + Train failed |" in text
    assert "| Ray Data + Train | failed |" in page.figures_text(page.results())
    page.plot(page.results()["train"], tmp_path / "plot.svg")
    assert "<svg" in (tmp_path / "plot.svg").read_text()


def test_the_page_shows_the_results_that_are_kept() -> None:
    page = module("_page")
    results = page.results()
    assert page.PAGE.read_text(encoding="utf-8") == page.text(results), "python benchmarks/_page.py"
    assert page.FIGURES.read_text(encoding="utf-8") == page.figures_text(results), "python benchmarks/_page.py"


def test_trees(spark: Any) -> None:
    growing, work = module("growing"), module("work")
    frame = work.make_frame(spark, 8_192)
    errors = {
        name: growing.mean_squared_error(module(name).fit(frame, 5).predict)
        for name in ("trees_tritium", "trees_alone")
    }
    assert max(errors.values()) < 1.2 * min(errors.values()), errors


def test_real_tables(spark: Any, tmp_path: Path) -> None:
    tables = module("tables")
    tables.write(str(tmp_path), 2_000)
    frame = spark.read.parquet(str(tmp_path))
    losses = {name: module(name).fit(frame, 2).history[-1]["loss"] for name in ("tables_as_is", "tables_by_hand")}
    assert losses["tables_as_is"] == pytest.approx(losses["tables_by_hand"], rel=0.1)


def test_the_page_knows_the_estimators() -> None:
    page, keras_estimator, trees = module("_page"), module("keras_estimator"), module("trees")
    machine = dict.fromkeys(("cores", "processor", "memory GB", "python", "java", "commit", "date"), "?")

    def result(seconds: dict[str, float]) -> dict[str, Any]:
        runs = {name: [{"seconds": value, "loop": None, "mse": 0.1, "loss": 0.2}] for name, value in seconds.items()}
        return {"command": "python", "machine": machine, "systems": runs}

    found = {
        "keras": result({"ideal": 10.0, keras_estimator.OURS: 11.0, "horovod.spark": 20.0}),
        "trees": result({"ideal": 10.0, trees.OURS: 12.0}),
        "real_tables": result({"prepared in Spark by hand": 10.0, "as it is": 8.0}),
    }
    found["trees"]["systems"]["SynapseML"] = [{"error": "it did not start"}]
    text = page.text(found)
    assert "| `KerasEstimator` | 11.0 s | 0.91 × | horovod.spark 1.82 × |" in text
    assert "| Tritium, KerasEstimator: faster than horovod.spark | ≥ 2 × | 1.82 × |" in text
    assert "| Tritium, LightGBMRegressor: faster than SynapseML | ≥ 1 × | failed |" in text
    assert "| 8.0 s | – | prepared in Spark by hand 1.25 × |" in text
    assert "| as it is | 8.0 | 0.2000 | 1 |" in page.figures_text(found)


def test_the_settings_of_scoring(spark: Any, tmp_path: Path) -> None:
    module("score_batch_udf")
    module("scoring").write(str(tmp_path / "rows"), 2_000, spark)
    frame = spark.read.parquet(str(tmp_path / "rows" / "array"))
    frames = module("scoring_settings").frames_of(frame)
    means = {name: scored.agg(F.mean("prediction")).first()[0] for name, scored in frames.items()}
    assert max(means.values()) - min(means.values()) < 1e-6, means
