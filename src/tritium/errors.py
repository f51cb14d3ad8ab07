"""Every error that Tritium raises (any process).

TritiumError
├── SetupError              before anything has started; nothing is lost
│   ├── BadSetting          a setting is wrong, or two contradict each other
│   ├── BadFunction         the function, or something it captures, can't go to the ranks
│   ├── BadData             a column is missing, or its type or shape does not fit
│   ├── NotEnoughSlots      the cluster has fewer slots or accelerators than the gang needs
│   └── WrongVersion        Python, Spark or a library is missing, too old, or not the same everywhere
├── StartTimeout            the gang was not complete within `start_timeout`
├── DataError               found only when the data was read
│   ├── BadRow              a null, NaN, ragged or unknown value: column, row id and value
│   ├── EmptyShard          a rank has no rows to train on
│   ├── IncompleteShard     Spark cut a shard short
│   ├── DataChanged         the rows are not those of the checkpoint
│   └── SpoolFull           the disk under a spool is full
├── RankFailed              the first rank that failed; its own exception is `__cause__`
│   └── Stalled             no progress: a rank is considered hung, or no rows come
├── JobFailed               the Spark job ended for a reason that is no rank's: cancelled, or its source failed
├── RunCancelled            `Run.cancel` has ended the run
├── ScoringFailed           a part of `score(into=…)` failed; the finished ones are kept
├── ResultError             a result can't be pickled, or all together exceed Spark's limit
├── TrainingDiverged        a loss or the gradients are NaN or infinite
├── RanksDiffer             ranks hold different weights, or train different parameters
├── CheckpointFailed        a checkpoint could not be written; earlier ones are intact
├── StoreFailed             a file that a rank stores in the run directory could not be written
├── FetchFailed             a file could not be fetched from its URL, or is not the expected one
├── ModelError              a saved model can't be read
│   ├── SignatureMismatch   a DataFrame does not fit the model; every difference is listed
│   └── UntrustedModel      the model is made by code that the caller did not name as trusted
├── RequestFailed           a web service gave no value for a row
├── TooLarge                a value is too large for the control connection (world.gather, world.log)
└── WireError               a control connection broke, or its other end was not authentic
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

_USER = re.compile(r"(?<=://)[^\s/:@'\"]+:[^\s/@'\"]+(?=@)")
_STOPS = re.compile(r"(?<=[^\s./])([.?!])\.(?=\s|$)")
_KEYS = re.compile(
    r"""([?&](?:[\w.-]*(?:token|secret|passw|signature|credential|key)[\w.-]*|sig)=)[^\s&'"#\\]+""", re.IGNORECASE
)  # A backslash ends it: in JSON it is part of the quotation mark after a URL.

MALFORMED = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)
"""What Python raises where JSON, or bytes that it describes, are not of the form that their reader expects."""


def masked(text: str) -> str:
    """Return `text` without the passwords and keys of the URLs in it: `s3://***@bucket/runs?token=***`."""
    if "://" not in text:
        return text
    return _KEYS.sub(r"\1***", _USER.sub("***", text))


def one_stop(text: str) -> str:
    """Return `text` with one full stop where a quoted message that ends with one, or with "?", was followed by another.

    Text after an empty line, such as a rank's output, is left as it is.
    """
    first, gap, rest = text.partition("\n\n")
    return _STOPS.sub(r"\1", first) + gap + rest


class TritiumError(Exception):
    """The base class of Tritium's errors. Its text shows no passwords of URLs.

    Facts are attributes, and survive pickling (a rank's error is raised again on the driver). Each class declares its
    own, with the value that stands for "not known"; those here are of an error that a rank raised, or a run.

    rank, host, pid : of the rank.
    rank_traceback  : the rank's own, as text.
    run_dir         : of the run.
    lost            : whether nothing of the user's failed by itself, so that the gang was restarted (`retries`).
    out_of_memory   : whether it was, as far as is known, for want of memory.
    headline        : the first line of the message.
    spark_error     : Spark's own exception. Its text, with Java's stack, is in the run directory: spark-error.txt.
    """

    rank: int | None = None
    host: str | None = None
    pid: int | None = None
    rank_traceback: str = ""
    run_dir: str | None = None
    lost: bool = False
    out_of_memory: bool = False
    headline: str = ""
    spark_error: BaseException | None = None
    _transient: ClassVar[bool] = False

    @property
    def retry(self) -> bool:
        """Whether the same call may succeed when it is made again, as nothing of the user's is at fault."""
        return self.lost or self._transient

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(masked(one_stop(message)))
        self.__dict__.update(facts)


class SetupError(TritiumError):
    """An error found before anything has started."""


class BadSetting(SetupError, ValueError):
    """A setting is wrong, or two contradict each other.

    setting, settings : the name of the one that is wrong, or of several; of a `Gang`, the sentences on them.
    Others as the message has them: names of `parameters`, `differences` to a checkpoint, a `path`, a `name`.
    """

    setting: str | None = None
    settings: Sequence[str] = ()
    parameters: Sequence[str] = ()
    problems: Sequence[str] = ()
    differences: Sequence[str] = ()
    name: str | None = None
    key: str | None = None
    path: str | None = None
    store: str | None = None
    address: str | None = None
    uuid: str | None = None
    epoch: int | None = None
    step: int | None = None
    size: int | None = None
    limit: int | None = None


class BadFunction(SetupError, TypeError):
    """The function, or something it captures, can't be sent to the ranks. `variable`: what it captures."""

    variable: str | None = None


class BadData(SetupError, ValueError):
    """A column is missing, or its type or shape does not fit.

    column, value   : the one that does not fit.
    name            : of the DataFrame or batch column.
    problems        : sentences, where there are several. setting : that needs the data otherwise.
    label, output   : shapes that don't fit each other. shapes, counts : of all columns, of the ranks.
    """

    column: str | None = None
    value: Any = None
    name: str | None = None
    setting: str | None = None
    problems: Sequence[str] = ()
    label: Any = None
    output: Any = None
    shapes: Mapping[str, Any] | None = None
    counts: Any = None


class NotEnoughSlots(SetupError):
    """The cluster has fewer slots or accelerators than the gang needs. `needed`, `available`: ranks."""

    needed: int | None = None
    available: int | None = None
    setting: str | None = None


class WrongVersion(SetupError):
    """Python, Spark or a library is missing, too old, or not the same everywhere.

    library, module : what is missing. framework : that needs it. needed, found : versions. python : that lacks it.
    """

    library: str | None = None
    module: str | None = None
    framework: str | None = None
    needed: str | None = None
    found: str | None = None
    python: str | None = None


class StartTimeout(TritiumError, TimeoutError):
    """The gang was not complete within `start_timeout`. `missing`: tasks. `needed`, `available`: slots in ranks."""

    _transient = True
    missing: Sequence[int] = ()
    needed: int | None = None
    available: int | None = None


class MaxRuntimeReached(TritiumError, TimeoutError):
    """The run has reached `max_runtime`; the same call with its `run_dir` continues. `limit`: seconds."""

    limit: float | None = None


class DataError(TritiumError, ValueError):
    """An error found only when the data was read. `column`: in which it is."""

    column: str | None = None


class BadRow(DataError):
    """A value that can't be trained on.

    column, row_id, value : where it is, and what.
    row_key               : the values of `row_key` by column, where a launch has found them.
    name, batch_column    : of the DataFrame, and of what is made of the column.
    skippable             : whether `on_error="skip"` would leave the row out.
    reason                : the message without place and advice, as the column `prediction_error` has it.
    """

    row_id: int | None = None
    value: Any = None
    row_key: Mapping[str, Any] | None = None
    name: str | None = None
    batch_column: str | None = None
    skippable: bool = True
    reason: str = ""


class EmptyShard(DataError):
    """A rank has no rows to train on. `counts`: the rows per rank."""

    counts: Any = None


class IncompleteShard(DataError):
    """Spark ended a shard before its last row. `rows`: that came."""

    _transient = True
    rows: int | None = None


class DataChanged(DataError):
    """The rows are not those of the checkpoint. `shard`: of which DataFrame; in rows `before` and `rows`."""

    shard: str | None = None
    before: int | None = None
    rows: int | None = None


class SpoolFull(DataError):
    """The disk under a spool is full. `directory`; in bytes `written`, `needed`, `free`."""

    directory: str | None = None
    written: int | None = None
    needed: int | None = None
    free: int | None = None


class RankFailed(TritiumError):
    """The first rank that failed. `__cause__` is the user's own exception where it could be rebuilt.

    signal      : a name such as "SIGKILL", or None. exit_code : or None.
    traceback   : the rank's own, as text. log : its last lines.
    memory      : of one that was killed by SIGKILL, in bytes: its `peak`, its host's memory, its cgroup's limit and
                  kills.
    step, phase : at that time; None where unknown.
    """

    signal: str | None = None
    exit_code: int | None = None
    traceback: str = ""
    log: Sequence[str] = ()
    memory: Mapping[str, Any] | None = None
    step: int | None = None
    phase: str | None = None


class Stalled(RankFailed):
    """A rank made no progress for longer than `stall_timeout`, or no rows came. The message says where every rank is.

    step    : its last, from 1; None where it reported none.
    seconds : without progress.
    stacks  : the Python stacks of every rank as text (rank → text).
    stage   : Spark's, of a source without progress before a rank has started; `tasks` of it run, and `rank` and `host`
              are None.
    """

    _transient = True
    seconds: float = 0.0
    stacks: Mapping[int, str] = MappingProxyType({})
    stage: int | None = None
    tasks: int | None = None


class JobFailed(TritiumError):
    """The Spark job ended for a reason that is no rank's own.

    lost      : whether Spark lost an executor or a worker, so that the gang was restarted (`retries`).
    reason    : the line that says why. cancelled : whether the job was cancelled.
    jvm_gone  : whether Spark's JVM, or the Connect server, has ended.
    """

    reason: str = ""
    cancelled: bool = False
    jvm_gone: bool = False

    @property
    def retry(self) -> bool:
        """Whether the same call may succeed when it is made again: also with a new JVM."""
        return super().retry or self.jvm_gone


class ScoringFailed(TritiumError):
    """A part of `score(into=…)` failed; those that are finished are kept for the next call.

    first, last : the source partitions of the part. finished : the number of finished parts. reason : why, in a line.
    """

    first: int | None = None
    last: int | None = None
    finished: int = 0
    reason: str = ""


class RunCancelled(TritiumError):
    """`Run.cancel`, or leaving the block of a Run that had not ended, has ended the run."""


class ResultError(TritiumError):
    """A result can't be pickled or written, or all results together exceed `spark.driver.maxResultSize`.

    path : of the file that could not be written; in bytes `needed` and `free`.
    """

    path: str | None = None
    needed: int | None = None
    free: int | None = None


class TrainingDiverged(TritiumError, ArithmeticError):
    """A loss or the gradients are NaN or infinite. `step`: from 1. `column`: of the label, or None."""

    epoch: int | None = None
    step: int | None = None
    column: str | None = None


class RanksDiffer(TritiumError, RuntimeError):
    """Ranks hold different weights, or train different parameters. `ranks`: those unlike the rest. `tensor`: a name."""

    ranks: Sequence[int] = ()
    tensor: str | None = None


class CheckpointFailed(TritiumError, OSError):
    """A checkpoint could not be written, read or listed.

    path : of the checkpoint; of a failed write in bytes `needed`, `written`, `free` (None: not known).
    """

    _transient = True
    path: str | None = None
    needed: int | None = None
    written: int | None = None
    free: int | None = None


class StoreFailed(TritiumError, OSError):
    """A file that a rank stores could not be written.

    path : of the file; in bytes `written`, `needed`, `free` (None: not known).
    """

    _transient = True
    path: str | None = None
    written: int | None = None
    needed: int | None = None
    free: int | None = None


class FetchFailed(TritiumError, OSError):
    """A source of `tr.fetch` fails, or what came is not what was expected. It is raised on every rank.

    url : of the source. host : that has fetched from it. reason : the source's own words.
    expected, sha256 : the sums where they differ.
    """

    url: str = ""
    reason: str = ""
    expected: str | None = None
    sha256: str | None = None


class ModelError(TritiumError):
    """A saved model can't be read. `path`: of the model. `unread`: what of it."""

    path: str | None = None
    unread: Any = None


class SignatureMismatch(ModelError, ValueError):
    """A DataFrame or table does not fit the model. `differences`: sentences."""

    differences: Sequence[str] = ()


class UntrustedModel(ModelError):
    """The model is made by code that the caller does not trust. `origin`: where it names one."""

    origin: str | None = None


class RequestFailed(TritiumError):
    """A web service gave no value for a row. `url`; `status`: its last one, None without an answer; `row`: from 0."""

    url: str = ""
    status: int | None = None
    row: int | None = None


class TooLarge(TritiumError, ValueError):
    """A message over a control connection exceeds the limit. `size` and `limit`: bytes. `kind`: of the message."""

    size: int = 0
    limit: int = 0
    kind: str | None = None


class WireError(TritiumError, ConnectionError):
    """A control connection broke, or its other end is not authentic."""

    _transient = True


class TritiumWarning(UserWarning):
    """A warning of a program that works, but probably not as it is meant."""

    def __init__(self, message: str = "", *more: object) -> None:
        super().__init__(one_stop(message), *more)
