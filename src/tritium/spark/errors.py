"""Translate the exception of a Spark job into one of Tritium's errors (driver).

The error depends on the stage that failed. In the gang's own stage only Tritium's code runs, so a failure there without
a rank's exception is a loss. A failure in a stage of the source is the user's, unless Spark lost the task with its
executor or its Python worker. Only Spark's own part of an error is read: the classes and conditions of its exceptions,
and the beginning of its sentences, which can't contain text of the user's.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tritium.errors import IncompleteShard, JobFailed, ResultError, TritiumError, WrongVersion

LONGEST_REASON = 800
"""The most characters of a reason."""

_WRAPPERS = (
    "java.util.concurrent.ExecutionException",
    "java.util.concurrent.CompletionException",
    "java.lang.reflect.InvocationTargetException",
    "java.lang.reflect.UndeclaredThrowableException",
)
# Matches the class, as Spark Connect and Py4J write it.
_NAMED = re.compile(r"(?:\(|An error occurred while calling \S+\s*: )((?:[\w$]+\.)+[\w$]+)(?:\)|:) ")
_WRAPPED = "Exception thrown in awaitResult"
_ABORTED = "Job aborted due to stage failure: "
_PYTHON = "org.apache.spark.api.python.PythonException"

# The sentences of DAGScheduler and TaskSetManager, from their beginning to where the reason of a task begins.
_BARRIER = re.compile(
    r"Could not recover from a failed barrier ResultStage\. Most recent failure reason: "
    r"(?:Stage failed because barrier task [^\n]*? finished unsuccessfully\.\s*)?",
)
_TASK = re.compile(
    r"Task \d+ in stage (?P<stage>\d+)\.\d+ failed \d+ times, most recent failure: "
    r"Lost task \S+ in stage \S+ \(TID (?P<task>\d+)\) \([^\s()]+ executor [^\s()]+\): "
)
_STAGE = re.compile(
    r"\w+Stage (?P<stage>\d+) \([^\n]*?\) has failed the maximum allowable number of times: \d+\. "
    r"Most recent failure reason:\s*"
)
_LOST_OUTPUT = re.compile(r"A shuffle map stage with indeterminate output was failed and retried")
_TOO_LARGE = re.compile(r"Total size of serialized results of ")
_TOO_FEW_SLOTS = re.compile(r"\[SPARK-24819\]")

# The beginnings of TaskEndReason's texts, and of Java exceptions.
_EXECUTOR_LOST = re.compile(r"ExecutorLostFailure \(|ExecutorLostFailure\b")
_FETCH = re.compile(r"FetchFailed\(|org\.apache\.spark\.shuffle\.\w*FetchFailed\w*")
_TAKEN = re.compile(r"TaskKilled \(|TaskResultLost\b|Resubmitted\b|UnknownReason\b")
_THROWN = re.compile(r"(?P<type>[\w$]+(?:\.[\w$]+)+)(?:: ?(?P<text>.*))?", re.DOTALL)
_WORKER = re.compile(
    r"Python worker (?:exited unexpectedly|failed to connect back)|EOFException occurred while reading the port number|"
    r"(?:Bad data|No port number) in \S*pyspark\.daemon"
)
_DAEMON_SAYS = re.compile(r"\s*Error from python worker:\s+(?P<says>.*?)\nPYTHONPATH was:", re.DOTALL)
_NO_PYTHON = re.compile(r'Cannot run program "(?P<program>[^"]*)"')
_OURS = re.compile(r"tritium[/\\]gang[/\\](?:supervisor|coordinator)[/\\]\w+\.pyc?$")
_SET_PYTHON = (
    "set PYSPARK_PYTHON (or spark.pyspark.python with spark-submit) before the session is made"  # PySpark reads it then
)
_CANCELLED = re.compile(
    r"(?:\[SPARK_JOB_CANCELLED\] )?(?P<says>Job \d+ cancelled.*?)\.?(?: SQLSTATE: \w+)?\s*$", re.DOTALL
)
_STOPPED = re.compile(r"(?:\[SPARK_JOB_CANCELLED\] )?Job \d+ cancelled because SparkContext was shut down")
_DISK = re.compile(
    r"^(?:Caused by: )?(?:java\.[\w.]+Exception|org\.apache\.spark\.memory\.\w+): .*No space left on device"
)
_BATCH_TOO_LARGE = "org.apache.arrow.vector.util.OversizedAllocationException"
_OUT_OF_MEMORY = ("java.lang.OutOfMemoryError", "org.apache.spark.memory.SparkOutOfMemoryError")
OUT_OF_HEAP = 52
"""The exit code of a JVM of Spark's after an OutOfMemoryError (SparkExitCode.OOM)."""
TOO_MANY_FAILURES = 11
"""The exit code of the driver's JVM where more executors failed than it allows (EXCEED_MAX_EXECUTOR_FAILURES)."""
_OUT_OF_HEAP = re.compile(rf"(?:exited with|exit) (?:code|status):? {OUT_OF_HEAP}\b", re.I)
_WANT_OF_MEMORY = re.compile(
    rf"OutOfMemoryError|OOMKilled|memory limits|exit(?:ed with)? (?:code|status):? {OUT_OF_HEAP}\b", re.I
)
"""Not 137, the exit code of a process that SIGKILL has ended: a host that is taken away ends so, too."""
_LACKS = re.compile(r"^ModuleNotFoundError: No module named '([\w.]+)'", re.MULTILINE)
_OTHER_PYTHON = re.compile(r"^pyspark\.\S+: \[PYTHON_VERSION_MISMATCH\](.*)", re.MULTILINE)
_NEEDED = ("pyarrow", "numpy", "pandas", "pyspark", "py4j")
WHY_LOST = r"exit (?:code|status)|termination reason"
"""A pattern of those lines about a lost executor that say why it was lost, whatever the cluster's manager."""


@dataclass(frozen=True)
class Link:
    """One exception of a chain: its Java class, its condition (Spark's error class), and its message."""

    type: str
    condition: str
    message: str


@dataclass(frozen=True)
class Ended:
    """How a job failed: `where` ("gang", "source", or "" for neither), and the reason of the task or the job.

    why_lost : as `translate` takes it.
    """

    where: str
    reason: str
    type: str = ""
    condition: str = ""
    why_lost: str = WHY_LOST


def more_memory(setting: str, value: str) -> str:
    """Return the advice to raise a setting of Spark's JVMs, which is read when they start."""
    return (
        f"Raise {setting} before the session is made: SparkSession.builder.config({setting!r}, {value!r}), or --conf "
        f"{setting}={value} of spark-submit"
    )


EXECUTOR_MEMORY = (
    "An executor ran out of Java's memory. "
    + more_memory("spark.executor.memory", "4g")
    + " (with a local master spark.driver.memory), or give each task less, by more partitions: df.repartition(n) "
    "before what takes the memory, or spark.sql.shuffle.partitions."
)
DRIVER_MEMORY = f"Spark's driver ran out of Java's memory. {more_memory('spark.driver.memory', '4g')}."


def text_of(error: BaseException) -> str:
    """Return `str(error)`, or a substitute where the JVM that would have to be asked for it is gone."""
    try:
        return str(error)
    except Exception as problem:  # noqa: BLE001 - any of Py4J's, of the socket's
        return f"{type(error).__name__} (its text can't be had any more: {type(problem).__name__})"


def caused(problem: JobFailed, error: BaseException) -> JobFailed:
    """Return `problem` with Spark's own exception as its cause and its attribute `spark_error`."""
    problem.__cause__ = error
    problem.spark_error = error
    problem.out_of_memory = isinstance(problem, JobFailed) and bool(_WANT_OF_MEMORY.search(problem.reason))
    return problem


def chain(error: BaseException) -> list[Link]:
    """List the Java exceptions behind what PySpark raised, outermost first, without mere wrappers."""
    links: list[Link] = []
    try:
        java = getattr(error, "_origin", None) or getattr(error, "java_exception", None)
        while java is not None and len(links) < 20:
            links.append(Link(java.getClass().getName(), _condition(java), str(java.getMessage() or "")))
            java = java.getCause()
    except Exception:  # noqa: BLE001 - the JVM is gone: the links read so far are used
        java = None
    if not links:
        text = text_of(error)
        condition = getattr(error, "getCondition", lambda: None)() or ""
        named = _NAMED.match(text)
        type_ = named[1] if named else _PYTHON if type(error).__name__ == "PythonException" else ""
        links = [Link(type_, str(condition), text[named.end() :] if named else text)]
    told = [link for link in links if link.type not in _WRAPPERS and not link.message.startswith(_WRAPPED)]
    return told or links


def _condition(java: Any) -> str:
    try:
        return str(java.getCondition() or "")
    except Exception:  # noqa: BLE001 - most Java exceptions have none, and Py4J says so by raising
        return ""


def ended(links: list[Link], in_gang: Callable[[int, int], bool]) -> Ended:
    """Find where the job failed, and why. `in_gang(stage, task)` tells whether a stage or task id is the gang's."""
    head = links[0]
    message = head.message.removeprefix(_ABORTED)
    if match := _BARRIER.match(message):  # Only the gang's stage is a barrier stage.
        return Ended("gang", _without_driver_stack(message[match.end() :]))
    if match := _TASK.match(message):
        where = "gang" if in_gang(int(match["stage"]), int(match["task"])) else "source"
        return Ended(where, _without_driver_stack(message[match.end() :]))
    if match := _STAGE.match(message):
        where = "gang" if in_gang(int(match["stage"]), -1) else "source"
        return Ended(where, _without_driver_stack(message[match.end() :]))
    if _LOST_OUTPUT.match(message):
        return Ended("source", f"FetchFailed({message}")
    if _TOO_FEW_SLOTS.match(message):  # Slots were lost after they were counted.
        return Ended("gang", message)
    if head.message.startswith(_ABORTED):
        return Ended("", _without_driver_stack(message))
    if head.condition or head.type:  # Spark throws an error of a UDF or of SQL as it is
        return Ended("source", head.message, head.type, head.condition)
    return Ended("", message)


def _without_driver_stack(reason: str) -> str:
    return reason.partition("\nDriver stacktrace:")[0].rstrip()


def translate(
    error: BaseException,
    *,
    stopped: bool = False,
    where_it_ended: str = "",
    in_gang: Callable[[int, int], bool] = lambda stage, task: False,
    of_task: Callable[[str], TritiumError | None] = lambda line: None,
    why_lost: str = WHY_LOST,
) -> TritiumError:
    """Return the Tritium error for Spark's exception, which becomes its attribute `spark_error`.

    stopped  : whether the session was stopped.
    where_it_ended : of one that this program has not stopped, the sentence on where the cluster's manager says why.
    in_gang  : tells whether a stage or a task id is the gang's.
    of_task  : returns the error for the last line of a traceback from the gang's own task, where it knows one.
    why_lost : the pattern of lines that say why an executor was lost, see `Cluster.why_lost`.
    """
    links = chain(error)
    how = replace(ended(links, in_gang), why_lost=why_lost)
    problem = _translated(links, how, stopped, where_it_ended, of_task)
    problem.spark_error = error
    return problem


def _translated(
    links: list[Link],
    how: Ended,
    stopped: bool,
    where_it_ended: str,
    of_task: Callable[[str], TritiumError | None],
) -> TritiumError:
    head = links[0]
    if stopped or _STOPPED.match(head.message):
        return JobFailed(
            "The Spark job of this run was cancelled, because its SparkSession was stopped; all its ranks have been "
            f"ended. {where_it_ended}{' ' * bool(where_it_ended)}Make a new session, and launch with it.",
            cancelled=True,
        )
    cancelled = _CANCELLED.match(head.message)
    if head.condition in ("SPARK_JOB_CANCELLED", "OPERATION_CANCELED") or cancelled or _is_cancelled(head):
        says = f" Spark says: {cancelled['says'].strip()}." if cancelled else ""
        return JobFailed(
            f"The Spark job of this run was cancelled; all its ranks have been ended.{says}", cancelled=True
        )
    if how.where == "source" and _by_supervisor(how.reason):  # A gang's task without a barrier may never have reported.
        how = replace(how, where="gang")
    if how.where == "" and _TOO_LARGE.match(how.reason):
        return ResultError(
            f"The results of all ranks together are over spark.driver.maxResultSize: {first_line(how.reason)}. Return "
            "less, raise that setting, or store large things with world.store()."
        )
    type_, text = how.type, how.reason
    if not type_ and (thrown := _THROWN.match(how.reason)):
        type_, text = thrown["type"], thrown["text"] or ""
    if (known := _of_the_machines(how, type_, text, links)) is not None:
        return known
    if how.where == "gang":
        if type_ == _PYTHON and (known := of_task(python_error(text))) is not None:
            return known
        return JobFailed(f"The Spark job of this run failed: {reason_of(how)}", lost=True, reason=reason_of(how))
    if how.where == "source":
        return _of_the_source(how, type_, text)
    return JobFailed(
        f"The Spark job of this run failed: {first_line(how.reason)}", lost=False, reason=first_line(how.reason)
    )


def _is_cancelled(head: Link) -> bool:
    return not head.type and head.message.startswith("[OPERATION_CANCELED]")


def _of_the_machines(how: Ended, type_: str, text: str, links: list[Link]) -> TritiumError | None:
    """Return the error for lost map output, a wrong installation or a full disk, whatever the stage; else None."""
    if _FETCH.match(how.reason):
        return IncompleteShard(
            "Spark lost map output of the exchange, with its executor or its disk, before the ranks had read it: "
            f"{first_line(how.reason)} No rank took its shard for complete. Launch again, and Spark computes the "
            "source again."
        )
    if type_ == _PYTHON:
        return _of_the_installation(how, text)
    if type_ == _BATCH_TOO_LARGE:
        return JobFailed(
            f"A batch of rows is larger than Arrow can hold, 2 GB: {first_line(text)}. Lower "
            "spark.sql.execution.arrow.maxBytesPerBatch (64m by default) or "
            "spark.sql.execution.arrow.maxRecordsPerBatch (10000).",
            lost=False,
            reason=first_line(how.reason),
        )
    none = _NO_PYTHON.match(text)
    if none and (how.where == "gang" or "python" in none["program"].lower()):  # Any other is a program of the user's.
        return WrongVersion(
            f"The executors can't start Python: {first_line(text)}. Name one that is installed there: {_SET_PYTHON}."
        )
    lines = [*how.reason.splitlines(), *(f"{link.type}: {link.message}" for link in links[1:])]
    if full := next(filter(_DISK.match, lines), None):
        where = full.removeprefix("Caused by: ").strip()
        return JobFailed(
            f"A disk of Spark's is full: {where}. The exchange needs room for all rows in spark.local.dir, and every "
            "rank for its own once more: point it at a larger disk, or use more hosts.",
            lost=False,
            reason=where,
        )
    return None


def _of_the_installation(how: Ended, text: str) -> TritiumError | None:
    if other := _OTHER_PYTHON.search(text):
        return WrongVersion(
            f"Driver and executors run different Python versions: {other[1].strip()} Choose the same minor version: "
            f"{_SET_PYTHON}."
        )
    lacking = _LACKS.search(text)
    if lacking and (how.where == "gang" or lacking[1].partition(".")[0] in _NEEDED):
        return WrongVersion(
            f"The executors' Python lacks {lacking[1]!r}. They need pyarrow and numpy: install them there, or choose "
            f"another Python: {_SET_PYTHON}.",
            module=lacking[1],
        )
    return None


def _of_the_source(how: Ended, type_: str, text: str) -> JobFailed:
    """Return the error of a source: the user's own text first; or a lost task that Spark has retried to its limit."""
    if type_ in _OUT_OF_MEMORY:
        advice = DRIVER_MEMORY if how.type else EXECUTOR_MEMORY
        reason = f"{type_.rpartition('.')[2]}: {first_line(text)}"
        return JobFailed(f"The source of the data failed in Spark: {reason}. {advice}", lost=False, reason=reason)
    if how.condition == "" and _EXECUTOR_LOST.match(how.reason) and _OUT_OF_HEAP.search(how.reason):
        # Spark has tried the task again as often as spark.task.maxFailures says: it fails wherever it runs.
        reason = f"a task of the source was lost: {reason_of(how, own=False)}"
        return JobFailed(f"The Spark job of this run failed: {reason}", lost=False, reason=reason)
    if how.condition == "" and (_is_loss(how.reason) or _WORKER.match(text)):
        reason = f"a task of the source was lost: {reason_of(how, own=False)}"
        return JobFailed(f"The Spark job of this run failed: {reason}", lost=True, reason=reason)
    told = python_error(text) if type_ == _PYTHON else first_line(text or type_)
    name = "" if type_ == _PYTHON or re.match(r"\[[A-Z_.]+\]", told) else f"{type_.rpartition('.')[2]}: "
    trace = f"\n\n{_traceback(text)}" if type_ == _PYTHON else ""
    reason = f"{name}{told}"
    return JobFailed(
        f"The source of the data failed in Spark: {reason}{trace}", lost=False, reason=reason[:LONGEST_REASON]
    )


def _by_supervisor(reason: str) -> bool:
    """Tell by its traceback whether a Python worker's exception was raised in the gang's own task."""
    for line in _traceback(reason).splitlines()[1:]:
        if line.startswith('  File "'):
            if _OURS.search(line.partition('"')[2].partition('"')[0]):
                return True
        elif not line.startswith("    "):
            return False  # The frames end here, and the text of the exception follows.
    return False


def _is_loss(reason: str) -> bool:
    return bool(_EXECUTOR_LOST.match(reason) or _TAKEN.match(reason))


def reason_of(how: Ended, *, own: bool = True) -> str:
    """Return in one line why a task was lost.

    own : whether it was a supervisor.
    """
    thrown = _THROWN.match(how.reason)
    text = (thrown["text"] or "") if thrown else how.reason
    if _WORKER.match(text) and text.startswith("Python worker exited"):
        who = "its supervisor, a Python worker of Spark's," if own else "a Python worker of Spark's"
        return f"{who} was killed or crashed: probably out of memory, unless someone killed it"
    if (daemon := _DAEMON_SAYS.match(text)) and daemon["says"].strip():
        return f"Spark's Python daemon did not start; it says: {daemon['says'].strip().splitlines()[-1].strip()}"
    if _EXECUTOR_LOST.match(how.reason):
        return executor_lost(how.reason, how.why_lost)
    if thrown and thrown["type"] == "java.io.IOException" and text == "Stream closed":
        return (
            "Spark's connection to a Python worker there, or to the Python daemon that starts them, was closed, as one "
            f"of them has ended ({first_line(how.reason)})"
        )
    if thrown and thrown["type"] == _PYTHON:
        return f"{python_error(text)} (raised in the gang's Spark task, by no rank)"[:LONGEST_REASON]
    if thrown and thrown["type"] == "org.apache.spark.SparkException":
        return first_line(text)
    return first_line(how.reason)


def executor_lost(reason: str, why_lost: str = WHY_LOST) -> str:
    """Return the loss of an executor in one line, with those of the cluster manager's lines that give a reason."""
    lines = [" ".join(line.split()) for line in reason.splitlines() if line.strip() and not line.startswith("\tat ")]
    first, rest = lines[0], lines[1:]
    if first.endswith("Reason:") and rest:
        first, rest = f"{first} {rest[0]}", rest[1:]
    more = [line for line in rest if re.search(why_lost, line, re.I)]
    told = "; ".join([first.rstrip("."), *dict.fromkeys(line.rstrip(".") for line in more)])[:LONGEST_REASON]
    if told.endswith("code 137"):  # Standalone clusters say no more.
        told += " (SIGKILL: the host or its container was out of memory, or somebody killed it; see the executor's log)"
    return f"{told}. {EXECUTOR_MEMORY}" if _OUT_OF_HEAP.search(reason) else told


def first_line(text: str) -> str:
    """Return the first line that is not empty, up to LONGEST_REASON characters."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")[:LONGEST_REASON]


def _traceback(text: str) -> str:
    start = text.find("Traceback (most recent call last):")
    return re.sub(r"\s*SQLSTATE: \w+\s*$", "", text[max(0, start) :].partition("\n\tat ")[0]).rstrip()


def python_error(text: str) -> str:
    """Return the line of a Python traceback that names the exception: `ValueError: no such picture`."""
    lines = _traceback(text).splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith('  File "')]
    after = lines[frames[-1] + 1 :] if frames else lines
    told = next((line for line in after if line.strip() and not line.startswith("    ")), "")
    return told.strip() or first_line(text)
