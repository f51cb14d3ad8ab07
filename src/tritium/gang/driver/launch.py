"""Start a gang and bring its results back: the front door (driver)."""

from __future__ import annotations

import importlib
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import TYPE_CHECKING, Any

from tritium import ship
from tritium.data.schema import Data
from tritium.errors import BadSetting, TritiumError, TritiumWarning, masked
from tritium.frameworks import torch as pytorch
from tritium.gang.driver.captures import inspect, uses
from tritium.gang.driver.retry import until_no_loss
from tritium.gang.failure import Aside, Failure
from tritium.gang.limits import TEXT_BYTES
from tritium.gang.settings import Gang, showing
from tritium.observe.events import RunLog, new_run_dir
from tritium.observe.progress import Progress
from tritium.observe.report import Report
from tritium.observe.stored import Piece
from tritium.wire import clip

if TYPE_CHECKING:
    from typing_extensions import Unpack  # only type checkers need it, which bring it along

    from tritium.data.exchange import Exchange
    from tritium.gang.keywords import GangKeywords

_PLACES = {
    "cluster": "tritium.gang.driver.on_cluster",
    "driver": "tritium.gang.driver.local_processes",
    "here": "tritium.gang.driver.in_process",
}


@dataclass
class Run:
    """One launch that has ended well: every rank's result in rank order, and where its run directory is."""

    run_id: str
    run_dir: str
    results: list[Any] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=dict)


@dataclass
class Launch:
    """What the three places where a gang can run need to start one."""

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    gang: Gang
    data: Mapping[str, Data]
    exchange: Exchange | None
    spark: Any
    run_id: str
    watch: Watch
    ranks: int
    """The world size of this attempt; the place that runs it may change it within the gang's limits."""
    attempt: int = 0
    """How often this launch was lost before."""
    tensors: bool = False
    """Whether batches are torch tensors where nothing else is asked for."""
    kept: dict[int, Exchange] = field(default_factory=dict)
    """World size -> rows that are kept for the next attempt: at most one, and the same dict in every attempt."""

    @property
    def name(self) -> str:
        """Of this attempt: supervisors of an earlier one are refused by it."""
        return f"{self.run_id}.{self.attempt}"

    @property
    def streams(self) -> bool:
        """Whether ranks take rows while others still arrive."""
        return any(data.shuffle == "stream" for data in self.data.values())

    def sized(self, ranks: int) -> Launch:
        """This attempt with so many ranks."""
        if self.attempt:
            self.watch.note(f"starting again with {ranks} rank{'s' * (ranks != 1)}")
        return replace(self, ranks=ranks)

    def dealt(self) -> Exchange | None:
        """The rows of this attempt on Spark: the user's exchange, one that was kept, or a new one."""
        if self.exchange is not None or not self.data:
            return self.exchange
        from tritium.data.exchange import Exchange

        if not self.gang.persist:
            return Exchange(self.data, self.ranks)
        if self.ranks not in self.kept:
            if self.kept:
                self.watch.note(f"the rows that were kept are dealt to {next(iter(self.kept))} ranks: computed again")
                self.release()
            self.kept[self.ranks] = Exchange(self.data, self.ranks).persist()
        return self.kept[self.ranks]

    def release(self) -> None:
        """Give back the rows that were kept."""
        while self.kept:
            self.kept.popitem()[1].unpersist()

    def job(self) -> bytes:
        """The user's function with everything that goes with it, for the ranks."""
        decode = {name: dict(data.decode) for name, data in self.data.items()}
        job = (self.function, tuple(self.args), dict(self.kwargs), decode, self.tensors)
        return ship.pickle(job, self.gang.py_files)


@showing(Gang)
def launch(
    fn: Callable[..., Any],
    gang: Gang | None = None,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    data: Mapping[str, Any] | Exchange | None = None,
    spark: Any = None,
    **fields: Unpack[GangKeywords],
) -> list[Any]:
    """Run `fn(*args, **kwargs)` on every rank of a gang, and return one value per rank, in rank order.

    Args:
        fn: any picklable function. It need not know Tritium; `tritium.world()` tells it its rank and gives it its
            rows.
        gang: how the gang is started. Its fields can be given directly as keywords: `launch(train, ranks=4, gpus=1)`.
        data: named DataFrames, `{"train": df}`, or `tritium.Data` to say how columns are read. Every row goes to one
            rank, which reads it with `tritium.world().shard("train")`. pandas and Arrow tables are taken with
            `on="driver"` and `on="here"`.
        spark: the session; None takes the active one.

    Raises:
        SetupError: before anything has started (settings, function, data, slots, versions).
        StartTimeout: not every rank had started within `start_timeout`; none is left.
        DataError: a value that can't be trained on, or a shard without rows.
        RankFailed: a rank raised (then it is the `__cause__`), or was lost (killed, left, cut off) more than `retries`
            times; the others have been ended.
    """
    _refuse_arguments(fn, fields)
    return start(fn, Gang.of(gang, fields), args=args, kwargs=kwargs, data=data, spark=spark).results


def _refuse_arguments(fn: Callable[..., Any], fields: Mapping[str, Any]) -> None:
    """A keyword that is no setting but a parameter of the function was meant for it."""
    unknown = [name for name in fields if name not in Gang.fields()]
    try:
        meant = [name for name in unknown if name in signature(fn).parameters]
    except (TypeError, ValueError):  # not callable, or written in C
        return
    if meant:
        there = ", ".join(f"{name!r}: …" for name in meant)
        raise BadSetting(
            f"There is no setting {meant[0]!r} of a gang, but the function has a parameter of that name. Pass it as "
            f"kwargs={{{there}}}.",
            setting=meant[0],
        )


def start(
    fn: Callable[..., Any],
    gang: Gang,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    data: Mapping[str, Any] | Exchange | None = None,
    spark: Any = None,
    said: Sequence[str] = (),
    title: str = "",
) -> Run:
    """`launch`, with the run's directory and report beside its results. `said` are notes that come first, `title`
    says which of several runs this is."""
    if not callable(fn):
        raise BadSetting(f"launch takes a function, not {fn!r}. Pass it without calling it: launch(train, …).")
    refuse_arguments(fn, args, kwargs or {})
    for warning in inspect(fn, tuple(args), dict(kwargs or {}), gang.py_files):
        warnings.warn(warning, TritiumWarning, stacklevel=3)
    frames, exchange = _frames(data, gang)
    given = (*args, *(kwargs or {}).values())
    tensors = gang.framework == "torch" or uses(fn, "torch", given, gang.py_files)
    if tensors and exchange is None:
        frames = {name: pytorch.reading(frame) for name, frame in frames.items()}
    run_id, run_dir = new_run_dir(gang.run_dir)
    watch = Watch(run_id, run_dir, gang, sorted(frames), said, title)
    request = Launch(fn, args, kwargs or {}, gang, frames, exchange, spark, run_id, watch, gang.most, tensors=tensors)
    problem: BaseException | None = None
    try:
        results = until_no_loss(request, attempted)
        watch.settle()
    except BaseException as error:
        problem = error
        raise
    finally:
        release(request, problem is None)
        report = watch.close(problem)
    for aside in watch.asides:
        warnings.warn(masked(aside.story(run_dir)), TritiumWarning, stacklevel=3)
    return Run(run_id, run_dir, results, report)


def refuse_arguments(fn: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> None:
    """BadSetting when the function can't be called with these, as far as its signature tells."""
    if isinstance(args, str | bytes) or not isinstance(args, Sequence):
        raise BadSetting(f"args={args!r:.80} must be a list or tuple of arguments, such as args=({args!r:.80},).")
    try:
        known = signature(fn)
    except (TypeError, ValueError):  # some functions that are written in C tell nothing
        return
    try:
        known.bind(*args, **kwargs)
    except TypeError as error:
        name = getattr(fn, "__name__", type(fn).__name__)
        raise BadSetting(
            f"{name}{known} can't be called: {error}. It gets args=, which holds {len(args)}, and kwargs=, which holds "
            f"{', '.join(map(repr, kwargs)) or 'nothing'}; rows come from tritium.world().shard(name)."
        ) from None


def attempted(launch: Launch) -> list[Any]:
    """One attempt. What it has kept is for the next one only where an executor lived on with its part of it."""
    try:
        results: list[Any] = importlib.import_module(f"tritium.gang.driver.{_PLACES[launch.gang.on]}").run(launch)
        return results
    except TritiumError as error:
        if getattr(error, "signal", None) is None and getattr(error, "exit_code", None) is None:
            launch.release()
        raise
    finally:
        launch.watch.drop_partial()


def release(launch: Launch, ok: bool) -> None:
    """Give back what was kept; after an error that is on its way already, only say so if it can't be given back."""
    try:
        launch.release()
    except Exception as error:
        if ok:
            raise
        launch.watch.note(f"the rows that were kept could not be given back: {error!r:.200}")


def _frames(data: Mapping[str, Any] | Exchange | None, gang: Gang) -> tuple[dict[str, Data], Exchange | None]:
    if data is None:
        return {}, None
    if not isinstance(data, Mapping):
        exchange_type = importlib.import_module("tritium.data.exchange").Exchange
        if not isinstance(data, exchange_type):
            raise BadSetting(f'data={type(data).__name__} must be a mapping of names: data={{"train": df}}.')
        if not data.ranks == gang.least == gang.most:
            raise BadSetting(f"This exchange deals to {data.ranks} ranks, and the gang has {gang.ranks}.")
        return dict(data.data), data
    frames = {}
    for name, frame in data.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise BadSetting(f"data={{{name!r}: …}}: a name of a shard must be an identifier, such as 'train'.")
        frames[name] = frame if isinstance(frame, Data) else Data(frame)
    return frames, None


class Watch:
    """What is seen of a run while it goes on: everything goes to the run directory, and to the progress display.

    Nothing is written before the first event, so that a launch that is refused leaves nothing behind.
    """

    def __init__(
        self,
        run_id: str,
        run_dir: str,
        gang: Gang,
        names: Sequence[str],
        said: Sequence[str] = (),
        title: str = "",
    ) -> None:
        settings = {name: getattr(gang, name) for name in Gang.fields()} | {"run_id": run_id, "data": list(names)}
        self.run_dir = run_dir
        self._settings = settings
        self._gang = gang
        self._report = Report(run_id, run_dir, settings)
        self._started = time.monotonic()
        self._lock = threading.Lock()
        self._opened: tuple[RunLog, Progress] | None = None
        self._said, self._title = said, title
        self.received: Mapping[str, Any] | None = None
        """The fingerprint of the rows that all ranks have."""
        self.newest: tuple[int, str] | None = None
        """Step and place of the newest checkpoint that this run has saved, or went on from."""
        self.asides: list[Aside] = []
        """What raised in the last attempt without ending it."""

    def _open(self) -> tuple[RunLog, Progress]:
        with self._lock:
            if self._opened is None:
                try:
                    log = RunLog(self.run_dir, self._settings)
                except Exception as error:
                    raise BadSetting(
                        f"The run directory {self.run_dir} can't be used: {type(error).__name__}: {error}. Choose one "
                        "that this process can write to: run_dir=…, or the variable TRITIUM_RUNS.",
                        run_dir=self.run_dir,
                    ) from error
                shown: dict[str, Any] = {"output": self._gang.output, "show": self._gang.progress}
                progress = Progress(self._gang.most, title=self._title, **shown)
                self._opened = log, progress
                for text in map(masked, self._said):
                    for taker in (log, self._report, progress):
                        taker.event("note", text=text)
            return self._opened

    def event(self, kind: str, **fields: Any) -> None:
        """Something happened."""
        log, progress = self._open()
        if kind == "note":
            fields["text"] = masked(fields["text"])
        if kind == "received":
            self.received = fields["fingerprint"]
        if kind in ("checkpoint", "resumed"):
            self.newest = int(fields["step"]), str(fields["path"])
        elif kind == "aside":
            self.asides.append(Aside(**fields))
        elif kind == "retry":
            self.asides.clear()
        log.event(kind, **fields)
        self._report.event(kind, **fields)
        progress.event(kind, **fields)

    def output(self, rank: int, text: str) -> None:
        """A rank has printed."""
        log, progress = self._open()
        log.output(rank, text)
        progress.output(rank, text)

    def store(self, piece: Piece) -> None:
        """A rank stores a file, piece by piece. Raises StoreFailed."""
        if self._open()[0].store(piece):
            self.event("stored", name=piece.name)

    def settle(self) -> None:
        """Wait until all that ranks have stored is where it belongs. Raises StoreFailed."""
        if self._opened is not None:
            for name in self._opened[0].settle(self.note):
                self.event("stored", name=name)

    def open(self) -> None:
        """Make the run directory, so that what is wrong with it is found before anything has started: BadSetting."""
        self._open()

    def drop_partial(self) -> None:
        """The ranks have ended: what they have stored by half is removed."""
        if self._opened is not None:
            self._opened[0].drop_partial()

    def note(self, text: str) -> None:
        """A line for the person who waits."""
        self.event("note", text=text)

    def close(self, problem: BaseException | None) -> dict[str, Any]:
        """The end of the run, by this error if it is one; returns its report."""
        if self._opened is None:
            return {}
        if (verdict := self._report.build()["verdict"]) is not None:
            self.note(f"where the time went: {verdict}")
        if problem is not None:
            told = Failure.of(problem, -1)
            texts = {"text": told.text, "traceback": "" if told.how == "error" else told.traceback}
            cut = {name: masked(clip(text, TEXT_BYTES)) for name, text in texts.items()}
            self._report.failed_by(rank=None, how=told.how, type=told.type, **cut)
        self.event("ended", ok=problem is None, seconds=round(time.monotonic() - self._started, 3))
        log, progress = self._opened
        progress.close()
        report = self._report.build()
        log.report(report)
        log.close()
        if log.problem is not None:
            warnings.warn(masked(f"The run directory is not complete: {log.problem}"), TritiumWarning, stacklevel=4)
        return report
