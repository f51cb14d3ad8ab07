"""`tritium doctor`: what Tritium needs, on this machine or on a cluster (driver)."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socketserver
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import click

from tritium.cli import judge, probe
from tritium.cli.findings import Finding, java, machine, show
from tritium.cli.run import Pair, session
from tritium.errors import TritiumError
from tritium.file_system import opened
from tritium.gang.driver.address import driver_place
from tritium.gang.settings import Gang
from tritium.spark.cluster import cluster_of
from tritium.spark.cluster.base import Cluster
from tritium.spark.errors import chain, first_line, translate
from tritium.spark.python import drivers_python

_JOB_SECONDS = 60.0
_SETTLED_SECONDS = 2.0
"""So long without a new executor, and no more are waited for."""
_EXECUTOR_SECONDS = 30.0


@click.command()
@click.option("--master", help="Look at the cluster of this Spark master, such as spark://host:7077 or yarn.")
@click.option("--remote", help="Look at the cluster behind this Spark Connect server, such as sc://host:15002.")
@click.option("--conf", type=Pair(), multiple=True, help="A setting of Spark's; the cluster is that of its settings.")
@click.option("--run-dir", help="Whether the driver can write here: a path, or any URL that fsspec supports.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def doctor(
    master: str | None, remote: str | None, conf: tuple[tuple[str, str], ...], run_dir: str | None, as_json: bool
) -> None:
    """Check what Tritium needs, on this machine or on a cluster.

    Without options, this machine is checked, and a gang of two ranks started here. With --master, --remote or --conf, a
    short Spark job looks at each executor too. The exit code is 1 if there is an error; warnings don't count.
    """
    if master is not None and remote is not None:
        raise click.UsageError("--master and --remote exclude each other.")
    with _written(run_dir) as (findings, file):
        if master is None and remote is None and not conf:
            findings = [*machine(), *findings]
        else:
            findings = [*_cluster(master, remote, conf, file), *findings]
    wrong = sum(finding.level == "error" for finding in findings)
    warnings = sum(finding.level == "warning" for finding in findings)
    if as_json:
        lines = [{"subject": f.subject, "level": f.level, "result": f.result, "fix": f.fix} for f in findings]
        click.echo(json.dumps({"errors": wrong, "warnings": warnings, "findings": lines}, indent=1))
        click.get_current_context().exit(1 if wrong else 0)
    show(findings)
    if wrong:
        raise click.ClickException(f"{wrong} of {len(findings)} will not do; how to fix each is written beside it.")
    click.echo("Everything is in place." if not warnings else f"Ranks can run; {warnings} warning(s) are above.")


@contextlib.contextmanager
def _written(run_dir: str | None) -> Iterator[tuple[list[Finding], str | None]]:
    """Write a file into the run directory; yield what there is to say, and its path where it is no URL."""
    if run_dir is None:
        yield [], None
        return
    url = f"{run_dir.rstrip('/')}/.tritium-doctor-{uuid.uuid4().hex[:8]}"
    fix = "choose another --run-dir; a store needs its fsspec package (s3fs, gcsfs, …) and credentials here"
    try:
        files, path = opened(url)
        missing = [parent for parent in _parents(path) if not files.exists(parent)]
        files.makedirs(files._parent(path), exist_ok=True)
        with files.open(path, "wb") as file:
            file.write(b"tritium doctor")
    except Exception as error:  # noqa: BLE001 - every store has errors of its own, and all of them are the finding
        yield [Finding("run_dir", f"{run_dir} can't be written: {type(error).__name__}: {error}", fix)], None
        return
    try:
        yield [Finding("run_dir", f"{run_dir} can be written by the driver")], path if os.path.isfile(path) else None
    finally:
        files.rm_file(path)
        for parent in missing:
            with contextlib.suppress(OSError):
                files.rmdir(parent)


def _parents(path: str) -> list[str]:
    """Return the directories above a path, the nearest first."""
    parents = []
    while (parent := path.rpartition("/")[0]) and parent != path:
        parents.append(parent)
        path = parent
    return parents


def _cluster(
    master: str | None, remote: str | None, conf: Sequence[tuple[str, str]], file: str | None
) -> list[Finding]:
    """Start a session, and return what the driver and the executors of its cluster have."""
    findings = [] if remote else [java()]
    try:
        spark = session("tritium doctor", master, conf, remote)
    except TritiumError:
        raise
    except Exception as error:  # noqa: BLE001 - Spark's own, Py4J's or gRPC's, which all mean that there is no session
        where = remote or master or "spark.master"
        fix = f"see those words, that {where} is reached from here, and that pyspark is of the cluster's version"
        return [*findings, Finding("session", first_line(chain(error)[-1].message), fix)]
    try:
        return [*findings, *_examined(spark, file)]
    finally:
        spark.stop()


def _examined(spark: Any, file: str | None) -> list[Finding]:
    try:
        cluster = cluster_of(spark)
    except TritiumError as error:
        return [Finding("session", str(error), "see the error beside this")]
    findings = [judge.spark(cluster), *judge.settings(cluster)]
    tasks = _tasks(cluster)
    if not tasks:
        return [*findings, judge.no_slots(cluster)]
    barrier = not cluster.allocates_dynamically()
    with _clock(spark, cluster, findings) as address:
        question = {"driver": address, "libraries": judge.LIBRARIES, "file": file, "barrier": barrier}
        try:
            answers = _asked(cluster, tasks, question)
        except Exception as error:  # noqa: BLE001 - whatever ends the job is the finding
            return [*findings, judge.job_failed(str(error) if isinstance(error, TimeoutError) else _translated(error))]
    return [*findings, *judge.executors(cluster, answers)]


def _tasks(cluster: Cluster) -> int:
    """Return how many tasks the probe has: one for each slot; 0: there is no executor."""
    gang = Gang.of(None, {"ranks": 1})
    if cluster.session.connect:
        ids = cluster.session.spark.range(10_000).selectExpr("spark_partition_id() AS id")  # As many as cores.
        return max(1, int(ids.distinct().count()) // cluster.cores_of_a_rank(gang))
    if cluster.allocates_dynamically():
        return max(2, cluster.slots(gang) or 0)  # Executors come when tasks wait.
    began = changed = time.monotonic()
    slots, expected = 0, cluster.expected_executors()
    while (now := time.monotonic()) - began < _EXECUTOR_SECONDS:
        if (present := cluster.slots(gang) or 0) != slots:
            slots, changed = present, now
        if slots and (0 < expected <= cluster.executors() or now - changed > _SETTLED_SECONDS):
            break
        cluster.sleep(0.1)  # Spark has no notification when an executor registers.
    return slots


def _asked(cluster: Cluster, tasks: int, question: dict[str, Any]) -> list[dict[str, Any]]:
    """Run the probe in so many tasks, and return their answers. Raises what Spark does, or TimeoutError."""
    spark, tag = cluster.session.spark, f"tritium-doctor-{uuid.uuid4().hex[:8]}"
    answers: list[str] = []
    errors: list[Exception] = []

    def work() -> None:
        cluster.session.tag(tag, "tritium doctor")
        try:
            answers.extend(_job(spark, cluster.session.connect, tasks, question))
        except Exception as error:  # noqa: BLE001 - it is raised by the thread that waits
            errors.append(error)

    thread = cluster.session.thread(work, "tritium-doctor")
    thread.start()
    thread.join(_JOB_SECONDS)
    if thread.is_alive():
        cluster.session.cancel(tag, "tritium doctor waited too long")
        raise TimeoutError(f"{tasks} tasks at once have not ended within {_JOB_SECONDS:.0f} s")
    if errors:
        raise errors[0]
    return [json.loads(answer) for answer in answers]


def _job(spark: Any, connect: bool, tasks: int, question: dict[str, Any]) -> list[str]:
    from pyspark import cloudpickle as untyped

    cloudpickle: Any = untyped
    cloudpickle.register_pickle_by_value(probe)
    try:
        if connect:
            ask = functools.partial(probe.in_arrow, question)
            rows = spark.range(0, tasks, 1, tasks).mapInArrow(ask, "facts string", barrier=question["barrier"])
            return [row.facts for row in rows.collect()]
        rdd = spark.sparkContext.parallelize(range(tasks), tasks)
        with drivers_python(spark):  # RDDs need no pyarrow, so an executor without it can say so.
            whole = rdd.barrier() if question["barrier"] else rdd
            return list(whole.mapPartitions(functools.partial(probe.in_rdd, question)).collect())
    finally:
        cloudpickle.unregister_pickle_by_value(probe)


class _Time(socketserver.StreamRequestHandler):
    timeout = 5

    def handle(self) -> None:
        if self.rfile.read(1):
            self.wfile.write(f"{time.time()!r}\n".encode())


@contextlib.contextmanager
def _clock(spark: Any, cluster: Cluster, findings: list[Finding]) -> Iterator[tuple[str, int] | None]:
    """Listen where a gang's coordinator would, and answer with the time; yield the address that executors are told."""
    try:
        place = driver_place(spark, cluster)
        listener = place.listen()
    except TritiumError as error:
        findings.append(Finding("route to driver", str(error), "see the error beside this"))
        yield None
        return
    server = socketserver.ThreadingTCPServer(listener.getsockname()[:2], _Time, bind_and_activate=False)
    server.socket.close()
    server.socket, server.daemon_threads = listener, True
    thread = threading.Thread(target=server.serve_forever, args=(0.1,), name="tritium-doctor-clock")
    thread.start()
    try:
        yield place.advertised, listener.getsockname()[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _translated(error: Exception) -> str:
    return str(translate(error, in_gang=lambda stage, task: True))
