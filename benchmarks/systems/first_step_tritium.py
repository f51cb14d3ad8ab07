"""How long after Spark's map stages the first step is taken: first_step_tritium.py --rows N --shuffle full|stream

The gang's tasks begin when the map stages are done, and a supervisor reports as soon as its task has begun: from then
on, to the end of the first step of the slower rank. Beside it, in the same process: the import of torch in two
processes at once, and how long two tasks take to read the same shuffle and drop it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import work


def first_step() -> float:
    """When the first step was done, in seconds since 1970."""
    import tritium as tr

    done = []

    def batches(_: int) -> Iterator[tuple[Any, Any, float]]:
        batch = next(iter(next(tr.world().shard("train").epochs(1, batch_size=work.BATCH, device="cpu"))))
        yield batch["x"], batch["y"], batch.scale
        done.append(time.time())  # the loop asks for the next one

    work.train(1, batches)
    return done[0]


def timed_drop(batches: Iterator[Any]) -> Iterator[Any]:
    """Reads everything, and says from when to when."""
    import pyarrow as pa

    began = time.time()
    for _ in batches:
        pass
    yield pa.RecordBatch.from_pydict({"began": [began], "ended": [time.time()]})


def measure(spark: Any, rows: int, shuffle: str) -> dict[str, float]:
    import tritium as tr
    from tritium.data.exchange import Exchange

    data = tr.Data(work.make_frame(spark, rows), columns={"x": work.FEATURES, "y": [work.LABEL]}, shuffle=shuffle)
    with tempfile.TemporaryDirectory(prefix="run-") as run_dir:
        settings = {"framework": "torch", "progress": False, "run_dir": run_dir}
        done = max(tr.launch(first_step, ranks=work.RANKS, data={"train": data}, **settings))
        events = [json.loads(line) for line in Path(run_dir, "events.jsonl").read_text().splitlines()]
    began = max(datetime.fromisoformat(e["time"]).timestamp() for e in events if e["kind"] == "reported")
    dealt = Exchange({"train": data}, work.RANKS).frame
    tasks = dealt.mapInArrow(timed_drop, "began double, ended double").collect()
    imported = time.perf_counter()
    work.import_torch()
    return {
        "seconds": done - began,
        "read": max(task.ended for task in tasks) - min(task.began for task in tasks),
        "import": time.perf_counter() - imported,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--shuffle", choices=("full", "stream"), required=True)
    options = parser.parse_args()
    work.prepare()
    spark = work.session()
    measure(spark, 20_000, options.shuffle)
    found = measure(spark, options.rows, options.shuffle)
    spark.stop()
    print(json.dumps(found | {"versions": work.versions("pyspark", "torch", "pyarrow")}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
