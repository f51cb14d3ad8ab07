"""Record the events of a run in its directory and its report, and show its progress (driver)."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tritium.errors import BadSetting, WrongVersion, masked, one_stop
from tritium.events import (
    CheckpointLoaded,
    CheckpointSaved,
    Event,
    FileStored,
    GangFormed,
    GangRetried,
    GangStarted,
    NonFatalError,
    Note,
    Printed,
    RowsReceived,
    RunEnded,
    stamped,
)
from tritium.frameworks import find, to_json
from tritium.gang.failure import Failure
from tritium.gang.limits import TEXT_BYTES
from tritium.gang.settings import Gang
from tritium.observe.page import RunPage
from tritium.observe.progress import Progress
from tritium.observe.report import Report
from tritium.observe.run_directory import RunLog
from tritium.observe.stored import Piece
from tritium.observe.stream import EventStream
from tritium.wire import clip

if TYPE_CHECKING:
    from tritium.observe.timeline import SparkTask


class Recorder:
    """Writes events, output and stored files to the run directory, and shows them in the progress display.

    Writes nothing before the first event, so that a launch that is refused leaves no directory.
    """

    def __init__(
        self,
        run_id: str,
        run_dir: str,
        gang: Gang,
        names: Sequence[str],
        notes: Sequence[str] = (),
        title: str = "",
        training: Mapping[str, Any] | None = None,
    ) -> None:
        settings = {name: getattr(gang, name) for name in Gang.fields()} | {"run_id": run_id, "run_dir": run_dir}
        settings["data"] = list(names)
        settings["framework"] = to_json(find(gang.framework))
        settings |= {"title": title, "training": dict(training)} if training else {}
        self._run_id, self.run_dir = run_id, run_dir
        self._settings = settings
        self._gang = gang
        self._serves_page = bool(gang.ui)
        self._report = Report(run_id, run_dir, settings)
        self._page = RunPage()
        self._started = time.monotonic()
        self._lock = threading.Lock()
        self._opened: tuple[RunLog, Progress] | None = None
        self._notes, self._title = notes, title
        self.stream = EventStream()
        self.formed = False
        """Whether the gang of the present attempt has formed."""
        self.problems: list[str] = []
        """What is to be said at the end: the run directory is not complete."""
        self.received: Mapping[str, Any] | None = None
        """The fingerprint of the rows of all ranks; None before they have arrived."""
        self.newest: tuple[int, str] | None = None
        """Step and path of the newest checkpoint that this run has saved or resumed from."""
        self.spark_tasks: list[SparkTask] = []
        """Those of all attempts, where the run is traced and Spark tells of them."""
        self.non_fatal_errors: list[NonFatalError] = []
        """Exceptions and exits of the last attempt that did not end it."""

    def _open(self) -> tuple[RunLog, Progress]:
        with self._lock:
            if self._opened is None:
                if self._serves_page:
                    self._check_page()
                try:
                    log = RunLog(self.run_dir, self._settings)
                except Exception as error:
                    raise BadSetting(
                        f"The run directory {self.run_dir} can't be used: {type(error).__name__}: {error}. Choose one "
                        "that this process can write to: run_dir=…, or the variable TRITIUM_RUNS.",
                        run_dir=self.run_dir,
                    ) from error
                shown: dict[str, Any] = {"output": self._gang.output, "show": self._gang.progress}
                progress = Progress(self._gang.most, title=self._title, details=self._live_page, **shown)
                if self._serves_page:
                    self._show_page(log, progress)
                self._opened = log, progress
                self.stream.add(log.opened)
                for text in self._notes:
                    self._record(Note(text=text), *self._opened)
            return self._opened

    def serve_page(self, setting: str) -> None:
        """Serve the run's page, which a `setting` of Spark's asks for; before the first event.

        That what serves it is missing is noted: runs that worked shall not end because of a setting of all.
        """
        try:
            self._check_page()
        except WrongVersion as error:
            self.note(f"{setting}=true, and no page is served: {error}")
        else:
            self._serves_page = True

    def _check_page(self) -> None:
        from tritium.ui.server import check_installed

        check_installed()

    def _show_page(self, log: RunLog, progress: Progress) -> None:
        """Serve the run's page, and show its address, which is not recorded: its token is a secret."""
        from tritium.gang.driver.told import told
        from tritium.ui.server import show

        progress.event(Note(text=f"the page of this run: {show(self.run_dir, str(log.folder), told)}"))

    def event(self, event: Event) -> None:
        """Record an event. The first one makes the run directory: BadSetting when that fails."""
        opened = self._open()
        if isinstance(event, RowsReceived):
            self.received = event.fingerprint
        elif isinstance(event, CheckpointSaved | CheckpointLoaded):
            self.newest = event.step, event.path
        elif isinstance(event, NonFatalError):
            self.non_fatal_errors.append(event)
        elif isinstance(event, GangFormed):
            self.formed = True
        elif isinstance(event, GangStarted | GangRetried):
            self.formed = False
        if isinstance(event, GangRetried):
            self.non_fatal_errors.clear()
        self._record(event, *opened)

    def _record(self, event: Event, log: RunLog, progress: Progress) -> None:
        self.stream.add(self._write(event, log, progress))

    def _write(self, event: Event, log: RunLog, progress: Progress) -> str:
        event = stamped(event, self._run_id)
        if isinstance(event, Note):
            event = replace(event, text=masked(event.text))
        line = log.event(event)
        self._report.event(event)
        self._page.add(event)
        progress.event(event)
        return line

    def output(self, rank: int, text: str) -> None:
        """Record and show output of a rank."""
        log, progress = self._open()
        self.stream.add(stamped(Printed(rank=rank, text=text), self._run_id).to_json())
        log.output(rank, text)
        progress.output(rank, text)

    def ranks(self, ranks: list[dict[str, Any]]) -> None:
        """Write what each rank does now, for who looks at the run directory."""
        if ranks:
            self._open()[0].ranks(ranks)

    def spans(self, rank: int, line: bytes) -> None:
        """Record spans of a rank's steps for the timeline."""
        self._open()[0].spans(rank, line)

    def store(self, piece: Piece) -> None:
        """Store a piece of a rank's file. Raises StoreFailed."""
        if self._open()[0].store(piece):
            self.event(FileStored(name=piece.name))

    def wait_for_uploads(self, check: Callable[[], object]) -> None:
        """Wait until every stored file is in the run directory (uploads included). Raises StoreFailed.

        check : called now and then; what it raises ends the wait.
        """

        def message(text: str) -> None:
            check()
            self.note(text)

        if self._opened is not None:
            for name in self._opened[0].wait_for_uploads(message):
                self.event(FileStored(name=name))

    def open(self) -> None:
        """Make the run directory before anything starts. Raises BadSetting when it can't be used."""
        self._open()

    def drop_partial(self) -> None:
        """Remove files that ranks have not stored completely; to be called when the ranks have ended."""
        if self._opened is not None:
            self._opened[0].drop_partial()

    def _live_page(self) -> str:
        return self._page.live(self._report.build())

    def page(self) -> str:
        """Return the page about the run so far, as HTML without a frame."""
        return self._page.body(self._report.build())

    def note(self, text: str) -> None:
        """Show and record a line of text."""
        self.event(Note(text=one_stop(text)))

    def close(self, problem: BaseException | None) -> dict[str, Any]:
        """Record the end of the run, with the error that ended it or None, and return the report."""
        if self._opened is None:
            return {}
        if (verdict := self._report.build()["verdict"]) is not None:
            self.note(f"where the time went: {verdict}")
        if problem is not None:
            told = Failure.of(problem, -1)
            texts = {"text": told.text, "traceback": "" if told.how == "error" else told.traceback}
            cut = {name: masked(clip(text, TEXT_BYTES)) for name, text in texts.items()}
            self._report.failed_by(f"{told.type}: {cut['text']}", rank=None, how=told.how, type=told.type, **cut)
        log, progress = self._opened
        ended = RunEnded(ok=problem is None, seconds=round(time.monotonic() - self._started, 3))
        line = self._write(ended, log, progress)
        progress.close()
        report = self._report.build()
        try:
            log.report(report, self._page.document(report))
            if self._gang.trace:
                from tritium.observe import timeline

                log.timeline(functools.partial(timeline.write, run=self._run_id, tasks=self.spark_tasks))
            log.close()
        finally:  # Who gets this event finds the report in the run directory.
            self.stream.add(line)
        if log.problem is not None:
            self.problems.append(f"The run directory is not complete: {log.problem}")
        return report
