"""A batch that is larger than Arrow can hold ends the gang at once, with Spark's reason and the settings to change.

Arrow's limit is 2 GB; the JVM of this test has a limit of 1 MB, by Arrow's own property.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from clusters import COMMON

DRIVER = """
import sys
import tritium as tr
from pyspark.sql import SparkSession, functions as F

builder = SparkSession.builder.master("local[2]")
for pair in sys.argv[2:]:
    builder = builder.config(*pair.split("=", 1))
spark = builder.getOrCreate()
wide = spark.range(0, 12, 1, 1).select(F.expr("array_repeat(cast(id as float), 25000)").alias("x"))
launch = {"data": {"train": wide}, "ranks": 1, "progress": False, "output": "none", "run_dir": sys.argv[1]}

def last():
    (epoch,) = tr.world().shard("train").epochs(1, batch_size=1)
    return sorted(float(batch["x"][0, -1]) for batch in epoch)

try:
    tr.launch(last, **launch)
except tr.errors.JobFailed as error:
    print(str(error).partition("\\n")[0], error.lost, "Attempt" in str(error))
spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "5")
print(tr.launch(last, **launch) == [[float(n) for n in range(12)]])
"""


def test_it_says_so_and_what_to_change(tmp_path: Path) -> None:
    small = f"{COMMON['spark.executor.extraJavaOptions']} -Darrow.vector.max_allocation_bytes=1048576"
    conf = {**COMMON, "spark.driver.extraJavaOptions": small}
    arguments = [f"{key}={value}" for key, value in conf.items()]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", DRIVER, str(tmp_path / "run"), *arguments],
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    failed, then = done.stdout.splitlines()
    assert failed.startswith("A batch of rows is larger than Arrow can hold, 2 GB: Memory required for vector"), failed
    assert "spark.sql.execution.arrow.maxRecordsPerBatch (10000)" in failed
    assert failed.endswith("False False"), failed
    assert then == "True", "the settings that the error names"
