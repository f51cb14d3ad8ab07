"""`score_into`: score a DataFrame part by part into a table, and go on where an earlier call has ended (driver).

The source's partitions are divided into parts, of consecutive partitions. Each part is one Spark job that computes
these partitions alone and writes their rows as a whole. Two jobs run at once, so that the second fills the cores that
the last tasks of the first leave idle. When a part is written, its record goes to the `resume` directory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tritium.checkpoint.code import code_of
from tritium.errors import BadSetting, DataChanged, ScoringFailed
from tritium.model.model import Model
from tritium.observe.scoring import ScoringProgress
from tritium.predict import fingerprints
from tritium.predict.ledger import Ledger, Part
from tritium.predict.targets import Target, target_of
from tritium.shown import shown
from tritium.spark import is_connect
from tritium.spark.errors import chain, first_line, python_error, text_of
from tritium.spark.inside import hadoop
from tritium.spark.inside import partitions as inside_partitions
from tritium.spark.inside.partitions import Partitions
from tritium.spark.job import TaggedJob
from tritium.spark.session import Session, safely

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PART_SECONDS = 20.0
"""How long a part should take: it is what a killed driver loses, and much more than the start of a job."""
AT_ONCE = 2
_GROWTH = 4  # A part has at most so many times the partitions of the one before it.
_TICK_SECONDS = 0.5
_PARALLELISM = "spark.sql.leafNodeDefaultParallelism"
_COALESCED = "spark.sql.adaptive.coalescePartitions.minPartitionNum"


@dataclass(frozen=True)
class Scored:
    """What `score(into=…)` has done. `rows` are the source's, of all parts; `scored` those that this call computed."""

    into: str
    rows: int
    scored: int
    parts: int
    kept: int
    """Parts that were finished before this call."""
    seconds: float


@dataclass(frozen=True)
class Work:
    """What is scored, how, and what of it is compared when it continues."""

    df: DataFrame
    transform: Callable[[DataFrame], DataFrame]
    facts: Mapping[str, Any]
    on_error: str
    changed: str
    verbose: bool


def score_into(work: Work, into: str, resume: str | None) -> Scored:
    """Write the rows of `work.df` with predictions into a target, and return what was done.

    into   : "parquet:PATH", "delta:PATH", or the name of a table.
    resume : a directory for the records of finished parts; None: none are kept, and another call begins again.

    Raises BadSetting for a target, a directory or a DataFrame that can't be used, or another scoring's directory;
    DataChanged where a finished part's rows are others now and `changed="refuse"`; ScoringFailed when a part fails.
    """
    refuse_unusable(work)
    target = target_of(work.df.sparkSession, into)
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="tritium-")) if resume is None else resume
        ledger = Ledger(directory)
        stack.enter_context(ledger.locked())
        return _Scoring(work, target, ledger).run()


def refuse_unusable(work: Work) -> None:
    """Raise BadSetting where the DataFrame, its session or a setting can't be used."""
    spark = work.df.sparkSession
    if is_connect(spark):
        raise BadSetting(
            "score(into=…) needs a classic Spark session: Spark Connect can't compute some partitions of a DataFrame "
            "alone. There, write model.transform(df) yourself."
        )
    if work.df.isStreaming:
        raise BadSetting(
            "score(into=…) takes a batch. A stream continues from its own checkpoint: "
            "model.transform(df).writeStream, with checkpointLocation."
        )
    for use in (inside_partitions.used, hadoop.used):
        if (why_not := use.why_not(spark)) is not None:
            raise BadSetting(f"score(into=…) can't be used in this session: {why_not} ({use.name}).")
    if work.changed not in ("recompute", "refuse"):
        raise BadSetting(
            f"changed={work.changed!r}: parts whose rows have changed are computed again ('recompute'), or are an "
            "error ('refuse').",
            setting="changed",
        )


def facts_of(model: Model, df: DataFrame, scored: DataFrame, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what must be equal for a scoring to continue: name → a value or its hash, JSON."""
    parts = model.engine.save(by_value=False)
    modules = getattr(model.module, "modules", None)
    kinds = [type(module) for module in modules()] if callable(modules) else [type(model.module)]
    code = code_of([list(dict.fromkeys(kinds)), dict(model.decode), model.input_transform])
    return {
        "weights of the model": parts.weights.digest(),
        "code of the model": code.exact,
        "signature of the model": _digest([model.engine.name, model.signature.to_json(), dict(parts.facts)]),
        "columns of the source": df.schema.simpleString(),
        "columns of the result": scored.schema.simpleString(),
        **settings,
    }


def refuse_another(before: Mapping[str, Any], work: Work, into: str, directory: str) -> None:
    """Raise BadSetting that names every difference between a recorded scoring and this one.

    on_error="fail" may become another: no finished part had a row that it changes.
    """
    now = {**work.facts, "on_error": work.on_error, "into": into}
    then = {**before["facts"], "on_error": before["on_error"], "into": before["into"]}
    if then["on_error"] == "fail":
        then["on_error"] = now["on_error"]
    differences = [
        f"{name}: {shown(now.get(name))}, was {shown(then.get(name))}"
        for name in dict.fromkeys([*then, *now])
        if then.get(name) != now.get(name)
    ]
    if differences:
        listed = "".join(f"\n  - {difference}" for difference in differences)
        raise BadSetting(
            f"resume={directory!r} has another scoring, which these would mix with:{listed}\nGo on with what it was "
            "begun with, or choose another directory and another target.",
            setting="resume",
            differences=differences,
        )


class _Scoring:
    """One call of `score_into`, which holds the ledger's lock."""

    def __init__(self, work: Work, target: Target, ledger: Ledger) -> None:
        self.work, self.target, self.ledger = work, target, ledger
        self.spark = work.df.sparkSession
        self.session = Session.of(self.spark)
        self.begun = time.monotonic()
        self.finished: list[Part] = []
        self.computed = 0
        """Rows that this call has scored."""
        self._changed = threading.Condition()
        self._running: list[tuple[Part, TaggedJob[None]]] = []
        self._problem: tuple[Part, BaseException] | None = None
        self._size = max(1, self.spark.sparkContext.defaultParallelism)
        """How many partitions the next part has."""

    def run(self) -> Scored:
        before = self.ledger.run()
        schema = self.work.transform(self.work.df).schema
        if before is None:
            self.target.refuse_taken(schema)
            before = self._begin()
        else:
            refuse_another(before, self.work, self.target.into, self.ledger.directory)
            if before["on_error"] != self.work.on_error:
                before["on_error"] = self.work.on_error
                self.ledger.begin(before)
        self.target.open(before["run"], schema)
        with _set_to(self.spark, self._planned_with(before["cores"])):
            partitions = Partitions(self.work.df.select("*"))
        left = self._left(partitions)
        kept = len(self.finished)
        title = f"tritium: scoring into {self.target.into}"
        progress = ScoringProgress(len(partitions), len(partitions) - len(left), title, show=self.work.verbose)
        try:
            self._compute(partitions, left, progress)
            self.target.close(self.finished)
            seconds = time.monotonic() - self.begun
            rows = sum(part.fingerprint[0] for part in self.finished if part.fingerprint)
            done = Scored(self.target.into, rows, self.computed, len(self.finished), kept, seconds)
            progress.close(f"done, {done.rows:,} rows, {done.scored:,} of them scored in {seconds:.1f} s")
        finally:
            progress.close()
        return done

    def _begin(self) -> dict[str, Any]:
        facts = {
            "run": secrets.token_hex(6),
            "into": self.target.into,
            "facts": dict(self.work.facts),
            "on_error": self.work.on_error,
            "cores": self.spark.sparkContext.defaultParallelism,
        }
        self.ledger.begin(facts)
        return facts

    def _planned_with(self, cores: int) -> dict[str, str]:
        """Return the settings with which Spark divides the source as a cluster of so many cores does by itself."""
        if cores == self.spark.sparkContext.defaultParallelism:
            return {}
        return {name: str(cores) for name in (_PARALLELISM, _COALESCED) if self.spark.conf.get(name, None) is None}

    # ---- what an earlier call has left

    def _left(self, partitions: Partitions) -> list[int]:
        """Return the source partitions to compute; `finished` are the parts to keep. Removes the output of others."""
        known = self.ledger.parts()
        if not known:
            return list(range(len(partitions)))
        every = range(len(partitions))
        prints = fingerprints.prints_of(partitions.frame(every), len(partitions))
        unrecorded = [part for part in known if part.fingerprint is None]
        for part in unrecorded:
            self._adopt(part)
        known = [part for part in known if part.fingerprint is not None]
        lost = [part for part in known if not self.target.is_there(part)]
        kept, changed, left = fingerprints.located([part for part in known if part not in lost], prints)
        refused = [part for part in changed if part not in unrecorded]
        if refused and self.work.changed == "refuse":
            raise self._changed_since(refused, kept, prints)
        if lost or changed:
            self.target.remove([*lost, *changed])
            for part in (*lost, *changed):
                self.ledger.forget(part)
        for part in kept:
            self.ledger.record(part)
        self.finished = kept
        return [partition for partition in left if prints[partition][0]]

    def _adopt(self, part: Part) -> None:
        """Take a part for finished whose output was committed by a process that was killed before it recorded that."""
        written = self.target.written(part)
        if written is None:
            self.ledger.forget(part)
            return
        part.output, rows = written
        part.fingerprint = fingerprints.print_of_rows(rows, self.work.df.columns)
        self.ledger.record(part)

    def _changed_since(self, changed: Sequence[Part], kept: Sequence[Part], prints: Sequence[Any]) -> DataChanged:
        clauses = []
        for part in changed[:8]:
            has = fingerprints.total(prints[part.first : part.first + part.count])[0]
            was = part.fingerprint[0] if part.fingerprint else 0
            last = part.first + part.count - 1
            where = f"partition {last}" if part.count == 1 else f"partitions {part.first} to {last}"
            clauses.append(f"{where}: {has:,} rows, were {was:,}" if has != was else f"{where}: {has:,} rows, others")
        more = f"; and {len(changed) - 8} more" if len(changed) > 8 else ""
        return DataChanged(
            f"The source has changed since {len(changed)} of {len(changed) + len(kept)} finished parts were scored "
            f'({"; ".join(clauses)}{more}). changed="recompute" computes these again and replaces their rows.'
        )

    # ---- the jobs

    def _compute(self, partitions: Partitions, left: list[int], progress: ScoringProgress) -> None:
        """Run the jobs of the partitions `left`, AT_ONCE at a time. Raises what the first failing part has raised."""
        done = len(partitions) - len(left)
        try:
            while self._running or (left and self._problem is None):
                while left and self._problem is None and len(self._running) < AT_ONCE:
                    self._start(partitions, _next_run(left, self._size))
                with self._changed:
                    if not any(job.ended for _, job in self._running):
                        self._changed.wait(_TICK_SECONDS)
                self.ledger.lock.renew()
                done += self._collect()
                progress.update(done + self._tasks_done(), self.computed)
        except BaseException:
            for _, job in self._running:
                job.cancel("the scoring was interrupted")
            for _, job in self._running:
                job.join()
            raise
        if self._problem is not None:
            raise self._failed(*self._problem)

    def _start(self, partitions: Partitions, indices: range) -> None:
        part = Part(indices.start, len(indices))
        self.ledger.record(part)
        last = indices.stop - 1
        where = f"partition {last}" if len(indices) == 1 else f"partitions {indices.start} to {last}"
        text = f"tritium: scoring source {where} of {len(partitions)} into {self.target.into}"
        work = _PartWork(self, part, partitions)
        job = TaggedJob(self.session, f"tritium-score-{part.id}", text, work, self._changed)
        self._running.append((part, job))
        job.start()

    def _collect(self) -> int:
        """Take the parts whose jobs have ended, and return the number of partitions that are finished."""
        ended = [(part, job) for part, job in self._running if job.ended]
        self._running = [(part, job) for part, job in self._running if not job.ended]
        count = 0
        for part, job in ended:
            job.join()
            if job.problem is not None:
                self._problem = self._problem or (part, job.problem)
                continue
            assert part.fingerprint is not None
            self.finished.append(part)
            self.computed += part.fingerprint[0]
            count += part.count
        return count

    def finish(self, part: Part, output: dict[str, Any], fingerprint: fingerprints.Print, seconds: float) -> None:
        """Record that a part is finished, and let the next ones take about PART_SECONDS (in the part's thread)."""
        part.output, part.fingerprint = output, fingerprint
        self.ledger.record(part)
        cores = max(1, self.spark.sparkContext.defaultParallelism)
        size = min(part.count * PART_SECONDS / max(seconds, 0.01), part.count * _GROWTH)
        self._size = max(1, int(size / cores)) * cores

    def _tasks_done(self) -> int:
        """Return how many partitions of the running parts are computed, as Spark's scheduler counts tasks."""

        def ask() -> int:
            tracker = self.session.context.statusTracker()
            jobs = [tracker.getJobInfo(job) for _, one in self._running for job in tracker.getJobIdsForTag(one.tag)]
            stages = {stage for job in jobs if job.isDefined() for stage in job.get().stageIds()}
            infos = [info.get() for info in map(tracker.getStageInfo, stages) if info.isDefined()]
            return sum(info.numCompletedTasks() for info in infos)

        return min(safely(ask, 0), sum(part.count for part, _ in self._running))

    def _failed(self, part: Part, problem: BaseException) -> ScoringFailed:
        text = text_of(problem)
        reason = (
            python_error(text) if "Traceback (most recent call last)" in text else first_line(chain(problem)[0].message)
        )
        last = part.first + part.count - 1
        keeps = (
            f"{len(self.finished)} parts are finished and kept. Call score again with the same resume= when the "
            "cause is gone, and only the others are computed; with on_error= a row that the model can't take fails no "
            "more."
        )
        error = ScoringFailed(
            f"Scoring source partitions {part.first} to {last} failed: {reason}. (Partition 0 in that text is "
            f"partition {part.first} of the source.) {keeps}",
            first=part.first,
            last=last,
            finished=len(self.finished),
            reason=reason,
        )
        error.spark_error = problem
        error.__cause__ = problem
        return error


class _PartWork:
    """The job of one part."""

    def __init__(self, scoring: _Scoring, part: Part, partitions: Partitions) -> None:
        self._scoring, self._part, self._partitions = scoring, part, partitions

    def __call__(self) -> None:
        scoring, part = self._scoring, self._part
        begun = time.monotonic()
        rows, observation = fingerprints.observed(self._partitions.frame(part.partitions))
        output = scoring.target.write(scoring.work.transform(rows), part)
        scoring.finish(part, output, fingerprints.print_of(observation), time.monotonic() - begun)


def _next_run(left: list[int], most: int) -> range:
    """Take the first consecutive indices, up to so many, out of `left`."""
    count = 1
    while count < min(most, len(left)) and left[count] == left[0] + count:
        count += 1
    first = left[0]
    del left[:count]
    return range(first, first + count)


@contextlib.contextmanager
def _set_to(spark: Any, values: Mapping[str, str]) -> Iterator[None]:
    """Give settings of the session these values within the block."""
    before = {name: spark.conf.get(name, None) for name in values}
    for name, value in values.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, old in before.items():
            if old is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, old)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]
