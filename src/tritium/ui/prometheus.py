"""The runs that go on, in the text format of Prometheus (driver)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tritium.ui.runs import Runs

_HELP = {
    "tritium_run_ranks": "Ranks of the gang.",
    "tritium_run_failed": "1 when a rank has failed, until the gang is formed again; else 0.",
    "tritium_run_value": "The newest value of each number that the run has logged.",
    "tritium_rank_step": "The newest step that the rank has logged, from 0.",
    "tritium_rank_rows": "Rows that the rank has taken in this attempt.",
    "tritium_rank_rows_per_second": "Rows a second of the rank.",
    "tritium_rank_gpu_utilization": "Share of the time in which the rank's GPUs computed, 0 to 1.",
    "tritium_rank_gpu_memory_bytes": "Memory of the rank's GPUs that is used.",
    "tritium_query_rows_per_second": "Rows a second of the streaming query's last micro-batches.",
    "tritium_query_batch_seconds": "Percentiles of the seconds of its last micro-batches.",
    "tritium_query_bad_rows": "Rows of them that the model could not take.",
    "tritium_query_model_version": "The version that scored the last one.",
}

_OF_RANK = {
    "step": "step",
    "rows": "rows",
    "rate": "rows_per_second",
    "gpu": "gpu_utilization",
    "gpu_memory": "gpu_memory_bytes",
}
"""Field of a rank on the page → name of its metric."""


def text(runs: Runs) -> str:
    """Return one sample for each run that goes on, its ranks and numbers, by name of the metric."""
    samples: dict[str, list[str]] = {name: [] for name in _HELP}
    for row in runs.rows():
        view = runs.get(row["key"]) if row["status"] == "running" else None
        if view is not None:
            for name, labels, value in _samples(row["run"], view.whole()):
                samples[name].append(f"{name}{{{_labels(labels)}}} {value}\n")
    heads = {name: f"# HELP {name} {about}\n# TYPE {name} gauge\n" for name, about in _HELP.items()}
    return "".join(heads[name] + "".join(lines) for name, lines in samples.items() if lines)


def _samples(run: str, parts: dict[str, Any]) -> Iterator[tuple[str, dict[str, str], float]]:
    yield "tritium_run_ranks", {"run": run}, len(parts["ranks"])
    yield "tritium_run_failed", {"run": run}, int(bool(parts["head"]["failure"]))
    if parts["scored"]:
        window = parts["scored"][-1]
        for field, name in (
            ("rows/s", "rows_per_second"),
            ("bad rows", "bad_rows"),
            ("model version", "model_version"),
        ):
            if field in window:
                yield f"tritium_query_{name}", {"run": run}, window[field]
        for field, share in (("p50 s", "0.5"), ("p99 s", "0.99")):
            if field in window:
                yield "tritium_query_batch_seconds", {"run": run, "quantile": share}, window[field]
    for name, series in parts.items():
        if name.startswith("metric ") and series["y"][-1] is not None:
            yield "tritium_run_value", {"run": run, "name": name.removeprefix("metric ")}, series["y"][-1]
    for rank in parts["ranks"]:
        for field, name in _OF_RANK.items():
            if rank.get(field) is not None:
                yield f"tritium_rank_{name}", {"run": run, "rank": str(rank["rank"])}, rank[field]


def _labels(labels: dict[str, str]) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
