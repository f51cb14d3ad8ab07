"""The class archive of the tests' JVMs (JEP 350): Spark's classes as they lie in memory, mapped instead of loaded.

A JVM of Spark loads some 14 000 classes. A session of two small jobs takes 12.1 s of processor time without the archive
and 7.0 s with it. The JVM itself checks that an archive is of its version and class path, and goes on without one that
is not.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

SECONDS = 300.0  # for writing it: 30 s of processor time
QUIET = "-Xlog:cds=off -Xlog:cds+dynamic=off"  # no warning where it does not fit, among the output that tests read
CLASSES = (  # of the other processes of a cluster, beside those that a session loads
    "org.apache.spark.deploy.master.Master",
    "org.apache.spark.deploy.worker.Worker",
    "org.apache.spark.deploy.worker.ExecutorRunner",
    "org.apache.spark.executor.CoarseGrainedExecutorBackend",
    "org.apache.spark.scheduler.cluster.StandaloneSchedulerBackend",
    "org.apache.spark.sql.connect.service.SparkConnectServer",
)


def path() -> Path | None:
    """Return where the archive of this Java and this PySpark lies, in .venv. None: there can be none."""
    java = shutil.which(f"{os.environ['JAVA_HOME']}/bin/java" if os.environ.get("JAVA_HOME") else "java")
    spark = find_spec("pyspark")
    if java is None or spark is None or not spark.origin or " " in sys.prefix:  # options are split at spaces
        return None
    jars = Path(spark.origin).parent / "jars"
    real = Path(java).resolve()
    key = f"{real} {real.stat().st_mtime_ns} {jars} {jars.stat().st_mtime_ns} {Path(__file__).read_text()}"
    return Path(sys.prefix, f"tests-classes-{hashlib.sha256(key.encode()).hexdigest()[:16]}.jsa")


def options() -> str:
    """Return the options by which a JVM uses the archive. Empty: there is none, and a JVM uses its own."""
    archive = path()
    return f"-XX:SharedArchiveFile={archive} {QUIET}" if archive and archive.exists() else ""


def write(jvm_options: str) -> None:
    """Write the archive unless it is there: once for all processes that ask at the same time. Else raise RuntimeError.

    jvm_options : those of the JVMs that will use it, such as the kind of garbage collector.
    """
    archive = path()
    if archive is None or archive.exists():
        return
    with archive.with_name("tests-classes.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if archive.exists():
            return
        with tempfile.TemporaryDirectory(prefix="classes-", dir=archive.parent) as folder:
            new = Path(folder, "archive")
            env = {**os.environ, "SPARK_SUBMIT_OPTS": f"{jvm_options} -XX:ArchiveClassesAtExit={new} {QUIET}"}
            command = [sys.executable, __file__, folder]
            run = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=SECONDS)
            if run.returncode or not new.exists():
                raise RuntimeError(f"the class archive of the tests could not be written:\n{run.stdout}{run.stderr}")
            for old in archive.parent.glob("tests-classes-*.jsa"):
                old.unlink()
            new.rename(archive)


def work(folder: str) -> None:
    """Do in a session what many tests do, so that its JVM loads the classes, and wait for the JVM to write them."""
    import pyspark
    from pyspark.ml.feature import VectorAssembler
    from pyspark.sql import SparkSession

    home = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    spark = home.config("spark.sql.shuffle.partitions", "2").config("spark.log.level", "OFF").getOrCreate()
    for name in CLASSES:
        with contextlib.suppress(Exception):  # another version of Spark may lack one
            spark._jvm.java.lang.Class.forName(name)
    rows = spark.range(0, 100, 1, 2).selectExpr("id", "cast(id as float) as x", "array(cast(id as float)) as xs")
    rows.write.parquet(f"{folder}/rows")
    rows = spark.read.parquet(f"{folder}/rows")
    rows.repartition(2).sortWithinPartitions("id").mapInArrow(lambda it: it, rows.schema, barrier=True).collect()
    rows.groupBy("x").count().join(rows, "x").orderBy("id").toPandas()
    VectorAssembler(inputCols=["id", "x"], outputCol="v").transform(rows).count()
    spark.createDataFrame(rows.toPandas()).union(rows).distinct().persist().count()
    jvm = pyspark.SparkContext._gateway.proc  # type: ignore[union-attr]
    spark.stop()
    jvm.stdin.close()  # at which it ends
    jvm.wait(SECONDS)


if __name__ == "__main__":
    work(sys.argv[1])
