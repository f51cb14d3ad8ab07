"""The thread of a Spark job ends, even where Spark no longer answers it."""

from __future__ import annotations

import base64
import json
import threading
import zlib
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.errors.exceptions.connect import PythonException, SparkConnectGrpcException

from tritium.errors import JobFailed
from tritium.gang.driver.spark_job import SparkJob
from tritium.spark.cluster.connect import Connect
from tritium.spark.job import TaggedJob
from tritium.spark.session import ConnectSession
from tritium.spark.sources import SourceWatch


class Client:
    """A stand-in for a Connect client as a job's thread needs it."""

    __module__ = "pyspark.sql.connect.session"
    client = SimpleNamespace(thread_local=threading.local())
    conf = SimpleNamespace(get=lambda name, default=None: default)

    def addTag(self, tag: str) -> None: ...
    def registerProgressHandler(self, handler: Any) -> None: ...
    def removeProgressHandler(self, handler: Any) -> None: ...


def job(error: Exception) -> SparkJob:
    def collect() -> None:
        raise error

    made = SparkJob.__new__(SparkJob)
    coordinator: Any = SimpleNamespace(changed=threading.Condition(), members={}, fail=lambda failure: None)
    client = ConnectSession(Client())
    TaggedJob.__init__(made, client, "tritium-1.0", "a job", made._collect, coordinator.changed)
    frame = SimpleNamespace(toArrow=collect, sparkSession=client.spark)
    made.__dict__.update(_coordinator=coordinator, _row_bytes=None, _frame=frame)
    made.__dict__.update(_cluster=Connect(client), _watch=SourceWatch.of(client, made.tag))
    made.run()
    return made


class Unreadable(Exception):
    """An exception as of a JVM that has died: its text can't be read from that JVM."""

    def __str__(self) -> str:
        raise ConnectionRefusedError("nobody listens")


@pytest.mark.parametrize("error", [Unreadable(), RuntimeError("x"), KeyError()])
def test_ends_with_an_error_whatever_was_raised(error: Exception) -> None:
    made = job(error)
    assert made.ended
    assert isinstance(made.problem, JobFailed)
    assert made.problem.spark_error is error
    assert not made.computing(2), "a job that has ended extends no deadline"


def test_a_failure_that_came_cut_off_is_told_and_not_tried_again() -> None:
    packed = base64.b64encode(zlib.compress(json.dumps({"how": "exception", "pad": "x" * 9999}).encode())).decode()
    text = (
        "[PYTHON_EXCEPTION] An exception was thrown from the Python worker: Traceback (most recent call last):\n"
        '  File "far.py", line 1, in supervise_far\n    raise\n'
        f"tritium.errors.TritiumError: rank 1 on b raised ValueError: mine\ntritium-failure:{packed[:20]}"
    )
    made = job(RuntimeError(text))
    assert isinstance(made.problem, JobFailed)
    assert "rank 1 on b raised ValueError: mine" in str(made.problem)
    assert not made.problem.lost


UNAVAILABLE = "<_InactiveRpcError of RPC that terminated with:\n\tstatus = StatusCode.UNAVAILABLE"


def test_a_server_that_is_gone_is_told() -> None:
    class RetriesExceeded(Exception):
        """As earlier clients raise it."""

    for error in (SparkConnectGrpcException(UNAVAILABLE), RetriesExceeded()):
        problem = job(error).problem
        assert "The Spark Connect server can't be reached any more" in str(problem)


def test_what_a_function_of_the_source_says_of_another_server_is_its_own_error() -> None:
    """A feature store that does not answer is not Spark's server."""
    text = f'[UDF_ERROR] Traceback (most recent call last):\n  File "f.py", line 1\ngrpc.RpcError: {UNAVAILABLE}'
    problem = job(PythonException(text)).problem
    assert isinstance(problem, JobFailed)
    assert "can't be reached any more" not in str(problem)
    assert "UNAVAILABLE" in str(problem)
