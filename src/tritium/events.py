"""Everything that happens in a run, as typed events with one JSON form (any process).

The progress display, the report, `events.jsonl` in the run directory, `Run.events()` and whoever called
`tritium.listen` get the same events. In JSON an event is one object: `time` (UTC), `run` (its id), `kind`, and the
fields of its class; an optional field that is None is left out. SCHEMA is the version of this form, written with every
RunOpened.

RunOpened                    a run directory was opened: settings and versions
├── GangStarted              a Spark job was submitted for the ranks (again after each retry)
├── Waiting                  a gang has not formed yet, and the reason
├── RankReported             a supervisor has connected
├── GangFormed               every rank is ready
├── RowsCounted              rows of a rank's shard so far, while they arrive
├── RowsReceived             all rows are there, with their fingerprint
├── Logged                   numbers of `world.log`: step, epoch, loss …
├── Printed                  text that a rank has printed (in `logs/`, not in `events.jsonl`)
├── EpochCounted             the end of a rank's epoch: rows used, padded, dropped
├── CheckpointSaved, CheckpointLoaded, FileStored
├── StepsTraced              the parts of the time of a rank's steps (`trace=True`)
├── ModelDescribed               the inputs and outputs of the model that was trained
├── Note                     a line for the user
├── NonFatalError            an exception that did not end the run
├── ConnectionRefused, Disconnected, Reconnected
├── RankEnded                a rank's function has returned
├── GangStalled, GangFailed, GangRegrouped, GangRetried
└── RunEnded                 the last event of every run
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, ClassVar

from tritium.errors import WrongVersion, masked

SCHEMA = 1
_CLASSES: dict[str, type[Event]] = {}


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened in a run.

    time : UTC, as ISO 8601 with milliseconds; empty until it is recorded.
    run  : the id of the run; empty until it is recorded.
    """

    kind: ClassVar[str]
    time: str = ""
    run: str = ""

    def __init_subclass__(cls, kind: str = "", **options: Any) -> None:
        super().__init_subclass__(**options)
        if kind:
            cls.kind = kind
            _CLASSES[kind] = cls

    def fields(self) -> dict[str, Any]:
        """Return the fields of the event's class by name, without optional ones that are None."""
        facts = vars(self)
        return {n: facts[n] for n, optional in _fields(self.kind).items() if not optional or facts[n] is not None}

    def to_json(self) -> str:
        """Return the event as one line of JSON, without the passwords of URLs."""
        values = {"time": self.time, "run": self.run, "kind": self.kind, **self.fields()}
        return masked(json.dumps(plain(values), ensure_ascii=False))


def read(line: str | bytes) -> Event:
    """Return the event of a line of `events.jsonl`, also of one that an earlier version has written.

    Raises WrongVersion for a line of a later schema, or of an unknown kind.
    """
    values = json.loads(line)
    kind = values.pop("kind")
    if kind == RunOpened.kind:
        values.setdefault("schema", 0)  # Before there was a schema, with the same kinds and fields.
    if values.get("schema", 0) > SCHEMA:
        raise WrongVersion(
            f"These events have the schema {values['schema']}, and this version of Tritium reads up to {SCHEMA}. "
            "Install the version that has written them, or a later one."
        )
    return made(kind, values)


def made(kind: str, values: Mapping[str, Any]) -> Event:
    """Return the event of this kind. Fields that its class does not have are left out."""
    if kind not in _CLASSES:
        raise WrongVersion(f"There is no event {kind!r} in this version of Tritium. It knows: {', '.join(_CLASSES)}.")
    names = _fields(kind).keys() | {"time", "run"}
    known: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in values.items() if n in names}
    return _CLASSES[kind](**known)


@functools.cache
def _fields(kind: str) -> dict[str, bool]:
    """Return the names of the fields of a kind's class, each with whether it is None by default."""
    return {f.name: f.default is None for f in dataclasses.fields(_CLASSES[kind]) if f.name not in ("time", "run")}


def stamped(event: Event, run: str = "") -> Event:
    """Return the event with the present time and the run's id, where it has none."""
    time = event.time or datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    return dataclasses.replace(event, time=time, run=event.run or run)


def plain(value: Any) -> Any:
    """Return `value` as JSON holds it: NumPy values as Python's, non-finite numbers and unknown objects as strings."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"nan": "NaN", "inf": "Infinity"}.get(str(value), "-Infinity")
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (Sequence, set, frozenset)) and not isinstance(value, (bytes, bytearray)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):  # NumPy's arrays and scalars have it, and tensors.
        return plain(value.tolist())
    return str(value)


# ---- The run and its attempts


@dataclass(frozen=True, kw_only=True)
class RunOpened(Event, kind="run"):
    """The first event of a run. Settings hold the names of `env` alone, whose values are often secrets."""

    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    schema: int = SCHEMA


@dataclass(frozen=True, kw_only=True)
class GangStarted(Event, kind="started"):
    """A Spark job was submitted.

    tag   : the tag of the Spark job.
    slots : the slots of the cluster for ranks of this kind; None where they can't be counted.
    bar   : whether Spark draws its progress bar on this process's stderr.
    """

    ranks: int
    tag: str = ""
    slots: int | None = None
    bar: bool = False


@dataclass(frozen=True, kw_only=True)
class Waiting(Event, kind="waiting"):
    """A gang that has not formed yet waits, as the sentence says."""

    text: str


@dataclass(frozen=True, kw_only=True)
class RankReported(Event, kind="reported"):
    """The supervisor of a task has connected. The gang's ranks are assigned when all have."""

    partition: int
    host: str
    pid: int


@dataclass(frozen=True, kw_only=True)
class GangFormed(Event, kind="formed"):
    """Every rank is ready.

    peers : by rank its `rank`, `host`, `address`, `local_rank`, `device`, `pid` and `devices`, the fields of
            each Device.
    """

    peers: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class RankEnded(Event, kind="rank_ended"):
    """The function of a rank has returned."""

    rank: int


@dataclass(frozen=True, kw_only=True)
class GangRetried(Event, kind="retry"):
    """The gang is started again after a loss.

    number : the number of this retry, from 1.
    of     : the number of retries that there may be.
    start  : the step of the checkpoint from which it goes on; None: from the beginning.
    """

    number: int
    of: int
    start: int | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class RunEnded(Event, kind="ended"):
    """The last event of a run.

    ok : whether every rank has returned.
    """

    ok: bool
    seconds: float


# ---- Models


@dataclass(frozen=True, kw_only=True)
class ModelDescribed(Event, kind="model"):
    """The signature of the model that an estimator has trained, or with which a streaming query begins.

    inputs, outputs : of each its name, dtype and shape of a row, and of an input its columns.
    ranges          : source column → its nulls and its range in the training's data, as `Signature.ranges`; None where
                      they are not known.
    """

    inputs: Sequence[Mapping[str, Any]]
    outputs: Sequence[Mapping[str, Any]]
    ranges: Mapping[str, Mapping[str, Any]] | None = None


@dataclass(frozen=True, kw_only=True)
class ModelVersion(Event, kind="model_version"):
    """A streaming query takes a newer version of the model that it follows, or refuses it.

    path    : the directory of versions, or the alias of MLflow's registry.
    refused : the reason; None where it is taken.
    """

    path: str
    version: int
    refused: str | None = None


@dataclass(frozen=True, kw_only=True)
class MicroBatchScored(Event, kind="micro_batch"):
    """A streaming query has scored a micro-batch, and its transformer has `metrics`.

    metrics                    : the value of that parameter, which each query's transformer has to itself.
    query                      : the id of the query, which it keeps when it is started again.
    model_ms_p50, model_ms_p99 : how long the calls took in which rows were scored, in milliseconds.
    model_rows_per_second      : the speed of one task.
    model_version              : of a model that follows.
    bad_rows                   : those that the model could not take, where `on_error` is not "fail".
    seconds                    : the whole micro-batch, from its trigger to its commit.
    """

    metrics: str
    query: str
    batch: int
    rows: int
    model_ms_p50: float | None = None
    model_ms_p99: float | None = None
    model_rows_per_second: float | None = None
    model_version: int | None = None
    bad_rows: int | None = None
    seconds: float | None = None


# ---- Rows


@dataclass(frozen=True, kw_only=True)
class RowsCounted(Event, kind="rows"):
    """The rows of a shard that have arrived.

    name  : the name of the DataFrame.
    ended : whether these are all rows of the rank.
    """

    name: str
    rank: int
    rows: int
    ended: bool = False


@dataclass(frozen=True, kw_only=True)
class RowsReceived(Event, kind="received"):
    """All rows of all ranks are there.

    rows        : name → rows by rank.
    fingerprint : name → by source partition its number, rows and the sum of their hashes, in hexadecimal.
    skipped     : name → rows by rank that were left out (`on_error="skip"`).
    """

    rows: Mapping[str, Sequence[int]]
    fingerprint: Mapping[str, Any]
    skipped: Mapping[str, Sequence[int]] | None = None


@dataclass(frozen=True, kw_only=True)
class EpochCounted(Event, kind="counts"):
    """The counts of a shard's rows in an epoch of a rank.

    shuffle_score : the share of the shard's rows among which a row's place was drawn, 0 to 1.
    """

    rank: int
    name: str
    epoch: int = 0
    steps: int = 0
    rows: int = 0
    used: int = 0
    padded: int = 0
    dropped: int = 0
    repeated: int = 0
    shuffle_score: float | None = None


# ---- Progress


@dataclass(frozen=True, kw_only=True)
class Logged(Event, kind="log"):
    """Numbers that a rank gave to `world.log`.

    step, epoch : from 0.
    rows        : all rows that the rank has taken.

    values      : numbers by name; in JSON, one that is not finite is a string, such as "NaN".
    histograms  : by name, of rank 0: `low` and `high` (the least and the greatest value), `counts` of 30 bins of one
                  width between them, `sum` and `sum_squares`.
    """

    rank: int
    step: int | None = None
    steps: int | None = None
    epoch: int | None = None
    epochs: int | None = None
    rows: int | None = None
    values: Mapping[str, float | str] | None = None
    histograms: Mapping[str, Mapping[str, Any]] | None = None


@dataclass(frozen=True, kw_only=True)
class Printed(Event, kind="output"):
    """Text that a rank has printed: not always whole lines."""

    rank: int
    text: str


@dataclass(frozen=True, kw_only=True)
class Note(Event, kind="note"):
    """A line for the user."""

    text: str


@dataclass(frozen=True, kw_only=True)
class StepsTraced(Event, kind="trace"):
    """The parts of the time of a rank's steps.

    seconds : section → seconds.
    arrive  : the seconds in which rows had yet to arrive.
    """

    rank: int
    steps: int = 0
    seconds: Mapping[str, float]
    arrive: float


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(Event, kind="checkpoint"):
    """A checkpoint is complete."""

    rank: int
    step: int
    bytes: int
    seconds: float
    path: str


@dataclass(frozen=True, kw_only=True)
class CheckpointLoaded(Event, kind="resumed"):
    """The gang goes on from a checkpoint."""

    step: int
    path: str


@dataclass(frozen=True, kw_only=True)
class FileStored(Event, kind="stored"):
    """A file that a rank has stored is in the run directory, under this name."""

    name: str


# ---- Faults


@dataclass(frozen=True, kw_only=True)
class NonFatalError(Event, kind="non_fatal_error"):
    """An exception, or an exit, in a rank that did not end the run: of a user's thread or an exit handler.

    late : whether it happened after every function had returned.
    """

    rank: int
    host: str
    pid: int
    where: str
    type: str
    text: str
    traceback: str
    late: bool

    def headline(self) -> str:
        """Return one line: rank, host, what was raised where."""
        what = f"{self.where} raised {self.type}: {self.text}" if self.type else self.text
        when = ", after every function had returned" if self.late else ""
        return f"rank {self.rank} on {self.host} (pid {self.pid}){':' if self.type else ''} {what}{when}"

    def as_warning(self, run_dir: str) -> str:
        """Return the headline, the traceback, and where the rank's output is."""
        first = self.headline()
        log = f"Every result is there. The rank's output: {run_dir}/logs/rank-{self.rank}.log"
        return "\n".join(filter(None, [f"{first[0].upper()}{first[1:]}.", self.traceback.rstrip(), log]))


@dataclass(frozen=True, kw_only=True)
class ConnectionRefused(Event, kind="refused"):
    """A connection to the coordinator was refused.

    number : the number of refused connections so far.
    """

    reason: str
    number: int


@dataclass(frozen=True, kw_only=True)
class Disconnected(Event, kind="disconnected"):
    """A supervisor's connection broke; it may come back."""

    rank: int
    host: str


@dataclass(frozen=True, kw_only=True)
class Reconnected(Event, kind="reconnected"):
    """A supervisor's connection is there again."""

    rank: int
    host: str


@dataclass(frozen=True, kw_only=True)
class FailureFacts:
    """The facts of a rank's failure, as `tritium.errors.RankFailed` has them.

    how       : "exception" (of the function), "error" (of Tritium's own), "signal", "exit" (before the function
                returned), "lost", "orphaned", "stalled", "returned" (another rank waited for it in vain), "regroup".
    rank      : -1 where it is no rank's.
    secondary : whether it may be the consequence of another rank's death.
    log       : the last lines of its output.
    others    : lines on where the other ranks were.
    memory    : figures of a rank that was killed, in bytes.
    at        : its step and phase.
    """

    how: str
    rank: int
    host: str = "?"
    pid: int = 0
    type: str = ""
    text: str = ""
    traceback: str = ""
    signal: str | None = None
    exit_code: int | None = None
    secondary: bool = False
    log: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    memory: Mapping[str, Any] | None = None
    at: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class GangFailed(FailureFacts, Event, kind="failed"):
    """A rank has failed, and the others are ended."""


@dataclass(frozen=True, kw_only=True)
class GangRegrouped(FailureFacts, Event, kind="regroup"):
    """The gang has saved its state, and is started again elsewhere or with more ranks; `text` is the reason."""


@dataclass(frozen=True, kw_only=True)
class GangStalled(Event, kind="stalled"):
    """Ranks, or the sources before a rank has started, make no progress, and the run goes on (`on_stall="report"`).

    rank    : the one at fault; None for a source.
    stage   : Spark's number of the stage of a source.
    tasks   : the number of its tasks that run.
    seconds : the time without progress.
    """

    text: str
    rank: int | None = None
    host: str | None = None
    stage: int | None = None
    tasks: int | None = None
    seconds: float | None = None
