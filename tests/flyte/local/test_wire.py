"""What a backend gets and what it is told, without a JVM: errors by class, templates of tasks, literals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from workflows import FOLDER, SECONDS, Place

GOLDEN = FOLDER / "golden.json"
AGAIN = (
    *("StartTimeout", "IncompleteShard", "Stalled", "CheckpointFailed", "StoreFailed", "WireError"),
    *("ConnectionResetError", "TimeoutError"),
)


def asked(place: Place, *what: str) -> Any:
    command = [sys.executable, str(FOLDER / "wire.py"), *what]
    done = subprocess.run(
        command, env=place.environment(), capture_output=True, text=True, check=False, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_errors_are_tried_again_by_their_class(tmp_path: Path) -> None:
    fates = asked(Place(tmp_path), "fates")
    expected = {
        "lost RankFailed": [True, "RankFailed", "RuntimeSystemError"],
        "lost JobFailed": [True, "JobFailed", "RuntimeSystemError"],
        "JobFailed without JVM": [True, "JobFailed", "RuntimeSystemError"],
        "RankFailed out of memory": [False, "OOM", "OOMError"],
        "RankFailed out of memory, on_oom": [True, "OOM", "OOMError"],
        "RankFailed of a KeyError": [False, "KeyError", "RuntimeUserError"],
        "MemoryError": [False, "OOM", "OOMError"],
        "Flyte's own": [True, "Theirs", "RuntimeSystemError"],
    }
    assert {name: fates.pop(name) for name in expected} == expected
    assert {name for name, fate in fates.items() if fate[0]} == set(AGAIN)
    for name, (again, code, caught) in fates.items():
        assert (code, caught) == (name, "RuntimeSystemError" if again else "RuntimeUserError")


def test_templates_and_literals_are_as_they_were(tmp_path: Path) -> None:
    """A new version of Flyte that changes one shows here. After a change of ours: write the printed JSON there."""
    found = asked(Place(tmp_path), "golden")
    assert found == json.loads(GOLDEN.read_text()), json.dumps(found, indent=1)


REFUSED = {
    "Gang(ranks=4, cpus=2, spark=Spark({'spark.executor.cores': 1}))": "spark.executor.cores=1 are fewer than",
    "Gang(ranks=4, spark=Spark({'spark.executor.instances': 3}))": "have no slots for 4 ranks: that takes 4.",
    "Gang(ranks=4, spark=Spark({'spark.dynamicAllocation.enabled': True}))": "the ranks of a gang start together",
    "Gang(gpus=2, spark=Spark({'spark.executor.resource.gpu.amount': 1}))": "are fewer than the gpus=2 of a rank",
    "Gang(ranks=2, on='driver')": "runs on the executors of its Spark",
    "Gang(num_ranks=2)": "Did you mean 'ranks'",
    "Gang(on_oom={'spark.executor.memory': 2})": "which spark=Spark({'spark.executor.memory': …}) has to have",
    "Gang(on_oom={'spark.executor.cores': 2})": "it raises one of spark.executor.memory",
    "Gang(on_oom={'spark.executor.memory': 1}, spark=Spark({'spark.executor.memory': '1g'}))": "a factor above 1",
}
DERIVED = "Gang(ranks=(2, 6), cpus=2, gpus=1, spark=Spark({'spark.executor.cores': 4, 'spark.x': True}))"


def test_the_application_follows_from_the_gang(tmp_path: Path) -> None:
    """And what contradicts it is refused where it is written."""
    *texts, conf = asked(Place(tmp_path), "configured", *REFUSED, DERIVED)
    for text, expected in zip(texts, REFUSED.values(), strict=True):
        assert expected in text
    assert conf == {
        "spark.executor.cores": "4",
        "spark.x": "true",
        "spark.executor.instances": "3",
        "spark.dynamicAllocation.enabled": "false",
        "spark.scheduler.minRegisteredResourcesRatio": "1.0",
        "spark.scheduler.maxRegisteredResourcesWaitingTime": "600s",
        "spark.executor.resource.gpu.amount": "2",
        "spark.executor.resource.gpu.vendor": "nvidia.com",
        "spark.executor.resource.gpu.discoveryScript": "/opt/spark/examples/src/main/scripts/getGpusResources.sh",
    }


OTHER_RESULTS = [
    "Gang(ranks=2)",
    "Gang(ranks=3)",
    "Gang(ranks=(2, 3))",
    "Gang(ranks=2, gpus=1)",
    "Gang(ranks=2, framework='torch')",
    "Gang(ranks=2, env={'A': '1'})",
    "Gang(ranks=2, spark=Spark({'spark.sql.ansi.enabled': False}))",
    "Spark()",
]
SAME_RESULTS = [
    "Gang(ranks=2)",
    "Gang(ranks=2, retries=7, stall_timeout=60, start_timeout=60)",
    "Gang(ranks=2, run_dir='/tmp/runs', progress=False, output='none')",
    "Gang(ranks=2, spark=Spark({'spark.executor.memory': '4g'}), on_oom={'spark.executor.memory': 2})",
]


def test_the_settings_of_a_gang_that_change_results_change_the_key_of_its_cache(tmp_path: Path) -> None:
    """And no others: not how often it is tried, on how large machines, and what is shown."""
    versions = asked(Place(tmp_path), "versions", *OTHER_RESULTS, *SAME_RESULTS)
    assert len(set(versions[: len(OTHER_RESULTS)])) == len(OTHER_RESULTS)
    assert set(versions[len(OTHER_RESULTS) :]) == {versions[0]}


def test_memory_grows_with_each_attempt_that_ran_out_of_it(tmp_path: Path) -> None:
    sizes = [list(conf.values()) for conf in asked(Place(tmp_path), "after_oom", str(tmp_path / "count"))]
    assert sizes == [["4096m", "512m"], ["6144m", "768m"], ["9216m", "1152m"]]
