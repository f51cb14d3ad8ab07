"""Runs tasks of a workflow, one after the other: python play.py FLOW PLACE '[["task", ["expression"]]]'.

FLOW is the file of the workflow. Flyte's home and cache are below $HOME; its data and metadata below PLACE. Prints a
line of JSON for each task: what it returned, or the error, and at the end whether this process has started a JVM.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import flyte


def main() -> None:
    flow, place, calls = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    flyte.init(local_persistence=True)
    spec = importlib.util.spec_from_file_location("flow", flow)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["flow"] = module
    spec.loader.exec_module(module)
    for name, arguments in calls:
        runner = flyte.with_runcontext("local", raw_data_path=str(place / "raw"), name=f"{name}-{time.time_ns()}")
        runner._metadata_path = str(place / "metadata")  # else /tmp/flyte, which all users share
        values = [eval(text, vars(module)) for text in arguments]
        say(played(runner, getattr(module, name), values))
    print("JVM", "pyspark" in sys.modules and sys.modules["pyspark"].SparkContext._gateway is not None, flush=True)


def played(runner: Any, task: Any, values: list[Any]) -> dict[str, Any]:
    try:
        outputs = list(runner.run(task, *values).outputs())
    except flyte.errors.BaseRuntimeError as error:
        kind = type(error).__name__
        return {"error": kind, "code": error.code, "kind": error.kind, "text": str(error)}
    except Exception:  # noqa: BLE001 - the test shows it.
        return {"error": "Exception", "text": traceback.format_exc()}
    return {"outputs": [plain(value) for value in outputs]}


def plain(value: Any) -> Any:
    return value if isinstance(value, (int, float, str, list, dict, bool, type(None))) else repr(value)


def say(answer: dict[str, Any]) -> None:
    print("ANSWER", json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
