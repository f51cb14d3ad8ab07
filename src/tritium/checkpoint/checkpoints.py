"""`world.checkpoint`: save a state of all ranks in the background, and load it on all ranks (rank).

A save makes three all-gathers in the background thread, with a tag of its own: rank 0 names the directory, all ranks
write their files and send the checksums, rank 0 writes the manifest. An error of one rank is raised on every rank.
"""

from __future__ import annotations

import json
import math
import operator
import pickle
import re
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

from tritium.checkpoint.control import Control, Regroup
from tritium.checkpoint.format import REPLICATED, Checkpoint, Damaged, Loaded, own
from tritium.checkpoint.state import Snapshot
from tritium.checkpoint.store import Store
from tritium.errors import BadSetting, CheckpointFailed, TritiumError
from tritium.events import CheckpointLoaded, CheckpointSaved, Note
from tritium.observe.run_directory import run_at

TAG = "checkpoint"
_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_TIME = re.compile(r"(\d+(?:\.\d+)?) ?(s|min|h)$")
_LOOK_SECONDS = 1.0
"""The time between two agreements of the ranks whether a save by time is due."""
_MOST_CALLS = 1000

State = Mapping[Any, Any] | Callable[[], Mapping[Any, Any]]


class Checkpoints:
    """The checkpoints of this run, for one rank. `world.checkpoint` returns it.

    Every rank makes the same calls at the same steps. At most one save is in flight; an error in it is raised by
    the next `save`, by `wait`, or at the end of the rank's function.
    """

    def __init__(self, control: Control, *, rank: int, size: int, host: str, run_id: str) -> None:
        self._control = control
        self._rank, self._size, self._host, self._run_id = rank, size, host, run_id
        self._store = Store(control.run_dir, control.progress.touch)
        self._state, self._own = Snapshot(), Snapshot()
        self._clock = Clock(
            lambda value: control.all_gather_async("checkpoint.save", value, f"{TAG} clock"),
            lambda: control.notice is not None,
        )
        self._last = 0
        """The step that was saved or loaded last."""
        self._reached = False
        self._thread: threading.Thread | None = None
        self._problem: BaseException | None = None

    def save(
        self,
        state: State,
        step: int,
        *,
        own: Any = None,
        every: int | float | str | None = None,
        keep: int = 2,
    ) -> bool:
        """Save if a save is due, and tell whether it was. Every rank calls it with the same `step`, `every`, `keep`.

        Copies the tensors and returns; they are written in the background. With `shuffle="stream"`, first waits until
        the rows of this rank's shards are known to be complete.

        With `every=`, it is to be called at every step. It then also saves within about two seconds and two steps after
        the end of this gang was announced (see `World.preempted`), waits until that is written, and does not return:
        the gang is started again from there, or the launch ends with MaxRuntimeReached.

        Args:
            state: a dict that is the same on every rank; rank 0 writes it. Tensors, NumPy arrays, numbers, strings,
                bools and None, in dicts, lists and tuples. Or a function that returns it, which every rank calls when
                a save is due.
            step: the current step; it never decreases.
            own: the state of this rank alone (random generators, position in the data), of the same types; or a
                function that returns it.
            every: None saves now; an int, every so many steps; "30s", "5min" or a float in seconds, by rank 0's
                clock. Ranks agree on that about once a second, without waiting for each other.
            keep: the number of checkpoints to keep; older ones are removed.

        Raises:
            BadSetting: a value that can't be kept (the message has its path); a run directory that a rank can't reach.
            CheckpointFailed: the save before this one could not be written. Earlier checkpoints are intact.
        """
        steps, seconds = every_of(every)
        step, keep = operator.index(step), operator.index(keep)
        if keep < 1:
            raise BadSetting(f"keep={keep} must be at least 1.")
        self._reach()
        if self._thread is not None and not self._thread.is_alive():
            self.wait()
        timed = every is not None and self._clock.due(math.inf if seconds is None else seconds)
        if not timed:
            if seconds is not None or not (steps is None or step // steps > self._last // steps):
                return False
            self._clock.reset()
        self._control.confirm_rows()  # Spark may still take back streamed rows, on which the state rests.
        self.wait()
        began = time.monotonic()
        now = state() if callable(state) else state
        if not isinstance(now, dict):
            raise BadSetting(f"world.checkpoint.save takes a dict, or a function that gives one, not {now!r:.200}.")
        mine = own() if callable(own) else own
        if self._rank == 0:
            self._state.take(now, "state")
        if mine is not None:
            self._own.take(mine, "own")
        self._last = step
        arguments = (step, keep, mine is not None, began)
        self._thread = threading.Thread(target=self._work, args=arguments, name="tritium-checkpoint", daemon=True)
        self._thread.start()
        if timed and self._clock.noticed:
            self.wait()
            raise Regroup
        return True

    def load(self) -> Loaded | None:
        """Load the newest complete checkpoint of the run directory, the same on every rank; None without any.

        Returns a dict with the attributes `step`, `size` (the world size at the save), `own` (every rank's own state,
        in rank order) and `path`. Tensors are on the CPU. A damaged checkpoint is skipped, with a note. Raises
        CheckpointFailed when the store does not answer.
        """
        self.wait()
        with self._control.progress.within("loading a checkpoint"):
            return self._load()

    def _load(self) -> Loaded | None:
        self._reach()
        candidates = None
        if self._rank == 0:
            candidates = self._attempt(self._store.candidates)
        loaded = None
        for name in self._exchange("checkpoint.load", candidates)[0] or ():
            attempt = self._attempt(partial(self._store.load, name))
            reasons = self._exchange("checkpoint.load", attempt if isinstance(attempt, BaseException) else None)
            reason = next((r for r in reasons if r is not None), None)
            if reason is None:
                loaded = attempt
                break
            self._store.damaged[name] = reason
        self._tell(loaded)
        if loaded is not None:
            self._last = loaded.step
        self._clock.reset()
        return loaded

    def regroup(self, state: State, step: int, *, own: Any = None, keep: int = 2) -> None:
        """Let a gang of `ranks=(least, most)` grow. Every rank calls it at the end of an epoch; arguments as of `save`.

        Returns at once when there are no further slots. Otherwise it saves and does not return: the gang is started
        again with more ranks, from this checkpoint.
        """
        if not self._control.elastic:
            return
        self.wait()
        if any(self._exchange("checkpoint.regroup", self._control.could_be_more)):
            self.restart(state, step, own=own, keep=keep)

    def restart(self, state: State, step: int, *, own: Any = None, keep: int = 2) -> NoReturn:
        """Save, and end this gang, to be started again from there. Every rank calls it; arguments as of `save`."""
        self.save(state, step, own=own, keep=keep)
        self.wait()
        raise Regroup

    def wait(self) -> None:
        """Wait for the save that is in flight, and raise its error, if any."""
        self.wait_quietly()
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem

    def wait_quietly(self) -> None:
        """Wait for the save that is in flight, without raising its error."""
        if self._thread is not None:
            with self._control.progress.within("saving a checkpoint"):
                self._thread.join()
            self._thread = None

    # ---- the background

    def _work(self, step: int, keep: int, owns: bool, began: float) -> None:
        try:
            self._save(step, keep, owns, began)
        except BaseException as error:  # noqa: BLE001 - raised by the next save, by wait, or at the end of the rank
            self._problem = error

    def _save(self, step: int, keep: int, owns: bool, began: float) -> None:
        first = self._rank == 0
        name = self._attempt(lambda: self._store.prepare(step)) if first else None
        answers = self._exchange("checkpoint.save", name if isinstance(name, BaseException) else (name, step))
        name = answers[0][0]
        try:
            done = self._fill(name, [at for _, at in answers], owns)
        except BaseException as error:
            if first:
                self._store.discard(name)
            if isinstance(error, TritiumError):  # The others wait in this all-gather, and must go on.
                self._exchange("checkpoint.save", None)
            raise
        if first:
            seconds, path = round(time.monotonic() - began, 3), self._store.where(name)
            self._control.tell(CheckpointSaved(rank=0, step=step, bytes=done.total, seconds=seconds, path=path))
            try:
                self._store.prune(keep)
            except CheckpointFailed as error:  # The save has succeeded, and the next one prunes again.
                self._control.tell(Note(text=str(error)))

    def _fill(self, name: str, steps: list[int], owns: bool) -> Checkpoint:
        """Write the files of a checkpoint, the manifest last. `steps` are those of all ranks, which must agree."""
        store, first = self._store, self._rank == 0
        if len(set(steps)) > 1:
            listed = ", ".join(f"rank {rank} saves step {step}" for rank, step in enumerate(steps))
            raise BadSetting(f"world.checkpoint.save: {listed}. All ranks must save at the same steps.")

        def write() -> dict[str, Any]:
            sums = store.write(name, REPLICATED, self._state) if first else {}
            return sums | (store.write(name, own(self._rank), self._own) if owns else {})

        def commit() -> Checkpoint:
            return store.commit(name, self._size, sums)

        answers = self._exchange("checkpoint.save", self._attempt(write))
        sums = {part: facts for answer in answers for part, facts in answer.items()}
        done: Checkpoint = self._exchange("checkpoint.save", self._attempt(commit) if first else None)[0]
        return done

    # ---- together with the other ranks

    def _attempt(self, work: Callable[[], Any]) -> Any:
        """Return `work()`, or its TritiumError (for `_exchange` to raise on every rank) or Damaged."""
        try:
            return work()
        except Damaged as error:
            return error
        except TritiumError as error:
            text = f"Rank {self._rank} on {self._host}: {error}"
            return type(error)(text, **{"rank": self._rank, "host": self._host, **error.__dict__})

    def _exchange(self, operation: str, value: Any) -> list[Any]:
        """Return every rank's value, with Damaged as text. Raises a TritiumError that any rank has sent."""
        blobs = self._control.all_gather(operation, pickle.dumps(value), TAG)
        values = [pickle.loads(blob) for blob in blobs]
        for answer in values:
            if isinstance(answer, TritiumError):
                raise answer
        return [str(answer) if isinstance(answer, Damaged) else answer for answer in values]

    def _reach(self) -> None:
        """At the first use, check on every rank that the run directory is this run's. Raises BadSetting on all."""
        if self._reached:
            return
        run_dir, run_id = self._control.run_dir, self._run_id
        try:
            run_there = run_at(run_dir)
            why = "" if run_there == run_id else f"run.json there is of the run {run_there}, and this is {run_id}"
        except Exception as error:  # noqa: BLE001 - whatever a file system raises: it is told on every rank
            why = f"run.json, which the driver wrote there, can't be read ({type(error).__name__}: {error})"
        problem = BadSetting(
            f"Rank {self._rank} on {self._host} does not reach the run directory {run_dir}: {why}. "
            "Checkpoints need a run_dir that is the same place for the driver and every rank: a shared disk, or a URL "
            "such as s3://bucket/runs/1.",
            rank=self._rank,
            host=self._host,
            path=run_dir,
        )
        self._exchange("checkpoint", problem if why else None)
        self._reached = True

    def _tell(self, loaded: Loaded | None) -> None:
        if self._rank != 0:
            return
        for reason in self._store.damaged.values():
            self._control.tell(Note(text=f"checkpoint passed over: {reason}"))
        if loaded is not None:
            text = f"continues from the checkpoint of step {loaded.step} in {loaded.path}"
            self._control.tell(Note(text=text))
            self._control.tell(CheckpointLoaded(step=loaded.step, path=loaded.path))
        elif self._store.damaged:
            self._control.tell(Note(text=f"no checkpoint in {self._store.path} can be loaded: starts over"))


class Clock:
    """Decides whether a save by time, or before the gang's end, is due, the same on all ranks, without waiting.

    At some call every rank begins an all-gather of its clock, and reads the result a number of calls later, when it has
    long arrived. That number and the decision depend only on the gathered values, so they are the same on every rank;
    at the pace of the slowest rank, the number is about a second of calls.
    """

    def __init__(
        self,
        all_gather: Callable[[bytes], Callable[[], list[bytes]]],
        has_notice: Callable[[], bool] = lambda: False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._all_gather = all_gather
        self._has_notice = has_notice
        self._now = now
        self.noticed = False
        """Whether the last save was due because some rank knows that the gang ends."""
        self._saved = self._sent = now()
        self._answers: Callable[[], list[bytes]] | None = None
        self._calls = 0
        """The calls since the last all-gather."""
        self._ahead = 1
        """The calls from an all-gather to its reading."""
        self._stale = False
        """Whether a save was made since the last all-gather."""

    def reset(self) -> None:
        """Restart the interval: a save was made for another reason."""
        self._saved = self._now()
        self._stale = True

    def due(self, seconds: float) -> bool:
        """Tell whether a save is due: after `seconds`, or as the end of the gang was announced.

        Must be called once a step, on every rank.
        """
        now = self._now()
        self._calls += 1
        if self._answers is not None and self._calls < self._ahead:
            return False
        due, ahead = False, 1
        if self._answers is not None:
            clocks = [json.loads(answer) for answer in self._answers()]
            pace, every = max(s["pace"] for s in clocks), clocks[0]["every"]
            self.noticed = any(s["notice"] for s in clocks)
            due = self.noticed or (not self._stale and clocks[0]["elapsed"] + self._ahead * pace >= every)
            wanted = min(_LOOK_SECONDS, every / 4) / pace if pace > 0 else 1.0
            ahead = int(max(1, min(wanted, 2 * self._ahead, _MOST_CALLS)))
        if due:
            self._saved = now
        pace = 0.0 if self._answers is None else (now - self._sent) / self._calls
        value = {"elapsed": now - self._saved, "pace": pace, "every": seconds, "notice": self._has_notice()}
        self._answers = self._all_gather(json.dumps(value).encode())
        self._sent, self._calls, self._ahead, self._stale = now, 0, ahead, False
        return due


def every_of(every: int | float | str | None) -> tuple[int | None, float | None]:
    """Return (steps, seconds) for `every`; at least one is None. Raises BadSetting."""
    if every is None:
        return None, None
    if isinstance(every, str):
        match = _TIME.match(every)
        seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
        if seconds > 0:
            return None, seconds
    elif isinstance(every, float):
        if 0 < every < math.inf:
            return None, every
    elif not isinstance(every, bool) and operator.index(every) > 0:
        return operator.index(every), None
    raise BadSetting(
        f'every={every!r} must be a number of steps (100) or a time: "30s", "5min", "2h", or a float in seconds (30.0).'
    )
