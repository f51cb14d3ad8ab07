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
├── ResultError             a result can't be pickled, or all together exceed Spark's limit
├── TrainingDiverged        a loss or the gradients are NaN or infinite
├── RanksDiffer             ranks hold different weights, or train different parameters
├── CheckpointFailed        a checkpoint could not be written; earlier ones are intact
├── StoreFailed             a file that a rank stores in the run directory could not be written
├── ModelError              a saved model can't be read
│   ├── SignatureMismatch   a DataFrame does not fit the model; every difference is listed
│   └── UntrustedModel      the model is made by code that the caller did not name as trusted
├── TooLarge                a value is too large for the control connection (world.gather, world.log)
└── WireError               a control connection broke, or its other end was not authentic
"""

from __future__ import annotations

import re
from typing import Any

_USER = re.compile(r"(?<=://)[^\s/:@'\"]+:[^\s/@'\"]+(?=@)")
_STOPS = re.compile(r"(?<=[^\s./])([.?!])\.(?=\s|$)")
_KEYS = re.compile(
    r"""([?&](?:[\w.-]*(?:token|secret|passw|signature|credential|key)[\w.-]*|sig)=)[^\s&'"#]+""", re.IGNORECASE
)


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

    facts : kept as attributes, and survive pickling (a rank's error is raised again on the driver).
    """

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(masked(one_stop(message)))
        self.__dict__.update(facts)

    def __getattr__(self, name: str) -> Any:  # For type checkers, as facts are set at run time.
        raise AttributeError(f"{type(self).__name__} has no {name!r}")


class SetupError(TritiumError):
    """An error found before anything has started."""


class BadSetting(SetupError, ValueError):
    """A setting is wrong, or two contradict each other."""


class BadFunction(SetupError, TypeError):
    """The function, or something it captures, can't be sent to the ranks."""


class BadData(SetupError, ValueError):
    """A column is missing, or its type or shape does not fit."""


class NotEnoughSlots(SetupError):
    """The cluster has fewer slots or accelerators than the gang needs."""


class WrongVersion(SetupError):
    """Python, Spark or a library is missing, too old, or not the same everywhere."""


class StartTimeout(TritiumError, TimeoutError):
    """The gang was not complete within `start_timeout`."""


class DataError(TritiumError, ValueError):
    """An error found only when the data was read."""


class BadRow(DataError):
    """A value that can't be trained on.

    Facts: `column`, `row_id`, `value`, and the values of `row_key` by column, where a launch has found them.
    """


class EmptyShard(DataError):
    """A rank has no rows to train on. Facts: `counts`, the rows per rank."""


class IncompleteShard(DataError):
    """Spark ended a shard before its last row."""


class DataChanged(DataError):
    """The rows are not those of the checkpoint. Facts: `shard`, and in rows `before` and `rows`."""


class SpoolFull(DataError):
    """The disk under a spool is full. Facts: `directory`, and in bytes `written`, `needed`, `free`."""


class RankFailed(TritiumError):
    """The first rank that failed.

    `__cause__` is the user's own exception where it could be rebuilt. Facts: `rank`, `host`, `pid`, `signal` (a name
    such as "SIGKILL", or None), `exit_code` (or None), `lost` (it did not fail by itself, so the gang was restarted
    as often as `retries` allows), `traceback` (the rank's own, as text), `log` (its last lines), `memory` (of one that
    was killed by SIGKILL, in bytes: its `peak`, its host's memory, its cgroup's limit and kills),
    `step` and `phase` (at that time; None where unknown), `run_dir`.
    """


class Stalled(RankFailed):
    """A rank made no progress for longer than `stall_timeout`, or no rows came. The message says where every rank is.

    Facts beside RankFailed's: `step` (its last, from 1; None where it reported none), `phase`, `seconds` without
    progress, and `stacks`, the Python stacks of every rank as text (rank → text). Of a source without progress before a
    rank has started: Spark's `stage`, and how many of its `tasks` run; `rank` and `host` are None.
    """


class JobFailed(TritiumError):
    """The Spark job ended for a reason that is no rank's own.

    Facts: `lost`, whether Spark lost an executor or a worker, so that the gang was restarted (`retries`),
    `reason`, the line that says why, `cancelled`, whether the job was cancelled, and `spark_error`, Spark's own
    exception or None. Its text, with Java's stack, is in the run directory: spark-error.txt.
    """

    lost: bool = False
    reason: str = ""
    cancelled: bool = False
    spark_error: BaseException | None = None


class RunCancelled(TritiumError):
    """`Run.cancel`, or leaving the block of a Run that had not ended, has ended the run."""


class ResultError(TritiumError):
    """A result can't be pickled or written, or all results together exceed `spark.driver.maxResultSize`."""


class TrainingDiverged(TritiumError, ArithmeticError):
    """A loss or the gradients are NaN or infinite. Facts: `epoch`, `step` (from 1), `rank`, `column` (or None)."""


class RanksDiffer(TritiumError, RuntimeError):
    """Ranks hold different weights, or train different parameters. Facts: `ranks`, those unlike the rest; `tensor`."""


class CheckpointFailed(TritiumError, OSError):
    """A checkpoint could not be written, read or listed. Facts: `path`, and of a failed write in bytes `needed`,
    `written`, `free` (None: not known)."""


class StoreFailed(TritiumError, OSError):
    """A file that a rank stores could not be written. Facts: `path`, and in bytes `written`, `needed`, `free` (None:
    not known)."""


class ModelError(TritiumError):
    """A saved model can't be read."""


class SignatureMismatch(ModelError, ValueError):
    """A DataFrame or table does not fit the model. Facts: `differences`, a list of sentences."""


class UntrustedModel(ModelError):
    """The model is made by code that the caller does not trust. Facts: `path`, and `origin` where it names one."""


class TooLarge(TritiumError, ValueError):
    """A message over a control connection exceeds the limit. Facts: `size` and `limit` (bytes)."""


class WireError(TritiumError, ConnectionError):
    """A control connection broke, or its other end is not authentic."""


class TritiumWarning(UserWarning):
    """A warning of a program that works, but probably not as it is meant."""

    def __init__(self, message: str = "", *more: object) -> None:
        super().__init__(one_stop(message), *more)
