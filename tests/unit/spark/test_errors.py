"""What Spark's errors become: by where they come from and what class they are, never by the words of the user's text.

The texts are Spark's own, as seen on 4.2 (`local`, `local-cluster`, Connect) and as its cluster managers write them.
"""

from __future__ import annotations

import pytest

from tritium.errors import BadSetting, IncompleteShard, JobFailed, ResultError, TritiumError, WrongVersion
from tritium.gang.control.address import unreachable, unreachable_in
from tritium.spark.cluster.kubernetes import Kubernetes
from tritium.spark.cluster.yarn import Yarn
from tritium.spark.errors import executor_lost, translate

ABORTED = "(org.apache.spark.SparkException) Job aborted due to stage failure: "
GANG = (
    f"{ABORTED}Could not recover from a failed barrier ResultStage. Most recent failure reason: Stage failed because "
    "barrier task ResultTask(0, 1) finished unsuccessfully.\n"
)
SOURCE = (
    f"{ABORTED}Task 3 in stage 7.0 failed 4 times, most recent failure: Lost task 3.3 in stage 7.0 (TID 11) "
    "(10.0.0.7 executor 2): "
)
STACK = (
    "\n\tat org.apache.spark.Some.where(Some.scala:1)\n\nDriver stacktrace:\n\tat org.apache.spark.Other(Other.scala:2)"
)
CRASHED = (
    "org.apache.spark.SparkException: Python worker exited unexpectedly (crashed). Consider setting "
    "'spark.sql.execution.pyspark.udf.faulthandler.enabled' to 'true' for the better Python traceback."
)
DAEMON = (
    "org.apache.spark.SparkException: EOFException occurred while reading the port number from pyspark.daemon's stdout."
)
KUBERNETES = (
    "ExecutorLostFailure (executor 3 exited caused by one of the running tasks) Reason: \n"
    "The executor with id 3 exited with exit code 137(SIGKILL, possible container OOM).\n\n\n\n"
    "The API gave the following brief reason: N/A\n"
    "The API gave the following message: N/A\n"
    "The API gave the following container statuses:\n\n\n"
    "\t container name: spark-kubernetes-executor\n"
    "\t container state: terminated\n"
    "\t container started at: 2026-11-22T10:00:00Z\n"
    "\t exit code: 137\n"
    "\t termination reason: OOMKilled\n      "
)
EVICTED = (
    "ExecutorLostFailure (executor 4 exited caused by one of the running tasks) Reason: \n"
    "The executor with id 4 exited with exit code 143(unexpected).\n"
    "The API gave the following brief reason: Evicted\n"
    "The API gave the following message: The node was low on resource: ephemeral-storage.\n\n"
    "The API gave the following container statuses:\n\n\n      "
)
YARN = (
    "ExecutorLostFailure (executor 1 exited caused by one of the running tasks) Reason: Container killed by YARN for "
    "exceeding physical memory limits. 5.5 GB of 5.5 GB physical memory used. Consider boosting "
    "spark.executor.memoryOverhead."
)
BAD_NODE = (
    "ExecutorLostFailure (executor 1 exited caused by one of the running tasks) Reason: Container from a bad node: "
    "container_1_2 on host: b. Exit status: 137. Diagnostics: [2026-11-22 10:00:00.000]Container killed on request. "
    "Exit code is 137\n[2026-11-22 10:00:00.001]Container exited with a non-zero exit code 137.\n.\n"
)
WORDS = (
    "payment was cancelled",
    "Job 3 cancelled",
    "ExecutorLostFailure",
    "ExecutorLostFailure (executor 1 exited) Reason: gone",
    "FetchFailed(here)",
    "No space left on device",
    "over spark.driver.maxResultSize",
    "SparkContext was shut down",
    "exited unexpectedly",
    "No module named 'cupy'",
)


def python(error: str, line: str = "raise Trouble(text)") -> str:
    return (
        "org.apache.spark.api.python.PythonException: [PYTHON_EXCEPTION] An exception was thrown from the Python "
        f'worker: Traceback (most recent call last):\n  File "prepare.py", line 7, in decode\n    {line}\n'
        f"    ^^^^\n{error}\n SQLSTATE: 38000"
    )


def told(text: str) -> TritiumError:
    why_lost = f"{Yarn.why_lost}|{Kubernetes.why_lost}"
    return translate(RuntimeError(text + STACK), of_task=unreachable_in, why_lost=why_lost)


@pytest.mark.parametrize(
    ("reason", "says"),
    [
        (DAEMON, "EOFException occurred while reading the port number from pyspark.daemon's stdout."),
        (
            "org.apache.spark.SparkException: \nError from python worker:\n  usage\n  python: No module named nope\n"
            "PYTHONPATH was:\n  /a\norg.apache.spark.SparkException: No port number in nope's stdout",
            "Spark's Python daemon did not start; it says: python: No module named nope",
        ),
        (CRASHED, "its supervisor, a Python worker of Spark's, was killed or crashed: probably out of memory"),
        (YARN, "Container killed by YARN for exceeding physical memory limits. 5.5 GB of 5.5 GB physical memory used."),
        ("java.net.SocketException: Connection reset", "java.net.SocketException: Connection reset"),
        ("TaskKilled (another attempt succeeded)", "TaskKilled (another attempt succeeded)"),
        ("java.lang.OutOfMemoryError: Java heap space", "java.lang.OutOfMemoryError: Java heap space"),
        (python("tritium.errors.WireError: no answer"), "tritium.errors.WireError: no answer"),
    ],
)
def test_whatever_fails_in_the_gangs_own_stage_is_a_loss(reason: str, says: str) -> None:
    error = told(GANG + reason)
    assert isinstance(error, JobFailed)
    assert error.lost
    assert says in str(error)
    assert "\n" not in str(error)


def by_supervisor(error: str) -> str:
    frame = '  File "/proc/7/fd/9/tritium/gang/supervisor/task.py", line 104, in supervise\n    yield from run()\n'
    start = "Traceback (most recent call last):\n"
    return python(error).replace(start, start + frame)


def test_without_a_barrier_a_traceback_tells_whose_task_it_was() -> None:
    """Of a task that never reported, nobody knows that it was the gang's."""
    said = unreachable("b", ("10.0.0.1", 4000), 10.0, OSError("timed out"))
    assert isinstance(told(SOURCE + by_supervisor(f"tritium.errors.WireError: {said}")), BadSetting)
    ended = "tritium.gang.supervisor.ending.GangEnded: partition 1 has reported already"
    error = told(SOURCE + by_supervisor(ended))
    assert isinstance(error, JobFailed)
    assert error.lost
    frame = '  File "/tritium/gang/supervisor/task.py", line 1, in supervise\n    pass'
    forged = f"RuntimeError: x\n{frame}\nWireError: {said}"
    assert not told(SOURCE + python(forged)).lost


def test_a_program_of_the_users_that_is_missing_is_no_python() -> None:
    missing = told(f'{SOURCE}java.io.IOException: Cannot run program "mytool": error=2, No such file or directory')
    assert isinstance(missing, JobFailed)
    assert "mytool" in str(missing)


def test_a_supervisor_that_can_not_reach_the_driver_names_the_settings() -> None:
    said = unreachable("b", ("10.0.0.1", 4000), 10.0, OSError("timed out"))
    assert isinstance(error := told(GANG + python(f"tritium.errors.WireError: {said}")), BadSetting)
    assert str(error).startswith("The executor on b can't reach the coordinator at 10.0.0.1:4000, tried for 10 s")
    assert "spark.tritium.driver.host" in str(error)
    users = told(SOURCE + python(f"RuntimeError: {said}"))
    assert isinstance(users, JobFailed), "the same words in a user's UDF"


@pytest.mark.parametrize("words", WORDS)
def test_a_users_udf_is_the_users_whatever_its_text_says(words: str) -> None:
    error = told(SOURCE + python(f"RuntimeError: {words}"))
    assert isinstance(error, JobFailed)
    assert not error.lost
    assert str(error).partition("\n")[0] == f"The source of the data failed in Spark: RuntimeError: {words}"
    assert 'File "prepare.py", line 7, in decode' in str(error)
    assert "SQLSTATE" not in str(error)
    assert not error.cancelled


@pytest.mark.parametrize("words", WORDS)
def test_so_is_an_error_of_sql_whatever_its_text_says(words: str) -> None:
    error = told(f"{SOURCE}org.apache.spark.SparkRuntimeException: [USER_RAISED_EXCEPTION] {words} SQLSTATE: P0001")
    assert isinstance(error, JobFailed)
    assert not error.lost
    assert str(error).startswith(f"The source of the data failed in Spark: [USER_RAISED_EXCEPTION] {words}")


def test_what_sql_and_files_say_is_the_users() -> None:
    zero = told(f"{SOURCE}org.apache.spark.SparkArithmeticException: [DIVIDE_BY_ZERO] Division by zero.")
    gone = told(f"{SOURCE}java.io.FileNotFoundException: File /lake/part-0 does not exist")
    assert str(zero) == "The source of the data failed in Spark: [DIVIDE_BY_ZERO] Division by zero."
    assert str(gone).endswith("FileNotFoundException: File /lake/part-0 does not exist")
    assert (zero.lost, gone.lost) == (False, False)


@pytest.mark.parametrize(
    ("reason", "says"),
    [
        (YARN, "exceeding physical memory limits"),
        (CRASHED, "a Python worker of Spark's was killed or crashed"),
        (DAEMON, "pyspark.daemon's stdout"),
    ],
)
def test_tasks_of_the_source_that_spark_lost_are_a_loss(reason: str, says: str) -> None:
    error = told(SOURCE + reason)
    assert isinstance(error, JobFailed)
    assert error.lost
    assert "a task of the source was lost" in str(error)
    assert says in str(error)


def test_an_exit_code_is_put_into_words() -> None:
    lost = "ExecutorLostFailure (executor 0 exited caused by a running task) Reason: Command exited with code "
    assert "137 (SIGKILL: the host or its container was out of memory" in executor_lost(f"{lost}137\n")
    assert executor_lost(f"{lost}1\n").endswith("code 1")


def test_the_cluster_managers_words_come_along() -> None:
    error = told(GANG + KUBERNETES)
    assert error.reason == (
        "ExecutorLostFailure (executor 3 exited caused by one of the running tasks) Reason: The executor with id 3 "
        "exited with exit code 137(SIGKILL, possible container OOM); exit code: 137; termination reason: OOMKilled"
    )
    assert "Exit code is 137" in told(GANG + BAD_NODE).reason
    assert told(GANG + EVICTED).reason.endswith(
        "with exit code 143(unexpected); The API gave the following brief reason: Evicted; The API gave the following "
        "message: The node was low on resource: ephemeral-storage"
    )


def test_lost_map_output_is_a_cut_shard() -> None:
    fetch = "FetchFailed(BlockManagerId(1, b, 7337, None), shuffleId=0, mapIndex=2, mapId=3, reduceId=1, message=\nx\n)"
    assert isinstance(told(GANG + fetch), IncompleteShard)
    assert isinstance(told(f"{GANG}org.apache.spark.shuffle.MetadataFetchFailedException: Missing"), IncompleteShard)
    stage = "ShuffleMapStage 3 (toArrow at a.py:1) has failed the maximum allowable number of times: 4. Most "
    assert isinstance(
        told(f"{ABORTED}{stage}recent failure reason:\norg.apache.spark.shuffle.FetchFailedException: gone"),
        IncompleteShard,
    )


@pytest.mark.parametrize("where", [GANG, SOURCE])
def test_a_full_disk_of_sparks_is_no_loss(where: str) -> None:
    error = told(f"{where}java.io.IOException: No space left on device")
    assert str(error).startswith(
        "A disk of Spark's is full: java.io.IOException: No space left on device. The exchange"
    )
    assert not error.lost


def test_what_executors_lack_is_said() -> None:
    lacks = python("ModuleNotFoundError: No module named 'pyarrow'")
    assert isinstance(told(GANG + lacks), WrongVersion)
    assert isinstance(told(SOURCE + lacks), WrongVersion)
    own = told(SOURCE + python("ModuleNotFoundError: No module named 'cupy'"))
    assert isinstance(own, JobFailed), "what a user's UDF imports is the user's"
    version = "pyspark.errors.exceptions.base.PySparkRuntimeError: [PYTHON_VERSION_MISMATCH] Python in worker has 3.9."
    assert "Python in worker has 3.9" in str(told(GANG + python(version)))
    none = told(f'{GANG}java.io.IOException: Cannot run program "python9": error=2, No such file or directory')
    assert isinstance(none, WrongVersion)
    assert 'Cannot run program "python9"' in str(none)


def test_results_over_the_limit() -> None:
    size = (
        "Total size of serialized results of 2 tasks (600.1 MiB) is bigger than spark.driver.maxResultSize (512.0 MiB)"
    )
    error = told(ABORTED + size)
    assert isinstance(error, ResultError)
    assert "600.1 MiB" in str(error)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "[SPARK_JOB_CANCELLED] Job 0 cancelled killed via the Web UI SQLSTATE: XXKDA",
            "Job 0 cancelled killed via the",
        ),
        ("[OPERATION_CANCELED] Operation has been canceled. SQLSTATE: HY008", "all its ranks have been ended."),
        ("(org.apache.spark.SparkException) Job 2 cancelled part of cancelled job tags x", "Job 2 cancelled part of"),
    ],
)
def test_a_cancelled_job(text: str, says: str) -> None:
    error = translate(RuntimeError(text))
    assert isinstance(error, JobFailed)
    assert error.cancelled
    assert says in str(error)
    assert not getattr(error, "lost", False)


def test_an_error_whose_text_cant_be_had_is_an_error_all_the_same() -> None:
    class Gone(Exception):
        def __str__(self) -> str:
            raise ConnectionRefusedError("the JVM is gone")

    error = translate(Gone())
    assert isinstance(error, JobFailed)
    assert "its text can't be had any more" in str(error)


TASK_HEAP = "java.lang.OutOfMemoryError: Java heap space\n\tat java.base/java.util.Arrays.copyOf(Arrays.java:3481)"
ACQUIRE = "org.apache.spark.memory.SparkOutOfMemoryError: [UNABLE_TO_ACQUIRE_MEMORY] Unable to acquire 65536 bytes"
EXIT_52 = (
    "ExecutorLostFailure (executor 4 exited caused by one of the running tasks) Reason: Command exited with code 52\n"
)
ON_KUBERNETES = (
    "ExecutorLostFailure (executor 3 exited caused by one of the running tasks) Reason: \nThe executor with id 3 "
    "exited with exit code 52(JVM OOM).\n"
)


@pytest.mark.parametrize("reason", [TASK_HEAP, ACQUIRE, EXIT_52, ON_KUBERNETES])
def test_a_source_that_is_out_of_javas_memory_names_the_setting(reason: str) -> None:
    error = told(SOURCE + reason)
    assert isinstance(error, JobFailed)
    assert not error.lost, "Spark has tried the task as often as it does"
    assert "SparkSession.builder.config('spark.executor.memory', '4g')" in str(error)
    assert "df.repartition(n)" in str(error)
    assert ".." not in str(error)


def test_so_do_a_gang_whose_executor_is_and_a_driver_that_is() -> None:
    error = told(GANG + EXIT_52)
    assert error.lost
    assert "spark.executor.memory" in str(error)
    head = "An error occurred while calling o1.collectToPython.\n: java.lang.OutOfMemoryError: Java heap space"
    assert "SparkSession.builder.config('spark.driver.memory', '4g')" in str(told(head))
