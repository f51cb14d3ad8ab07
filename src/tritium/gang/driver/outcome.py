"""Wait until a gang has formed and ended, and raise the error that ended it (driver)."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from tritium.errors import IncompleteShard, JobFailed, MaxRuntimeReached, Stalled, StartTimeout, TritiumError
from tritium.events import GangStalled, Waiting
from tritium.gang.limits import GRACE_SECONDS
from tritium.gang.supervisor.process_stats import STATES

if TYPE_CHECKING:
    from tritium.gang.coordinator.coordinator import Coordinator
    from tritium.gang.driver.attempt import Attempt
    from tritium.spark.sources import SourceStall

LOOK_SECONDS = 1.0
"""The time between two questions to Spark whether it still computes the sources."""
WAITING_SECONDS = 5.0
"""After this time the display says why a gang has not formed yet."""
FIRST_WORD_SECONDS = 20.0
"""After this time a note lists the missing ranks."""
GROW_SECONDS = 2.0
"""The time between two counts of slots for a gang that is smaller than `gang.most`."""
SIGNAL_SECONDS = 1.0
"""The longest time that a signal goes unnoticed which came just before the main thread began to wait."""
LEAVE_SECONDS = 1.0
"""The limit for supervisors to end by themselves before the Spark job is cancelled."""
MAX_RUNTIME = "max_runtime has passed"
WHY_SECONDS = 3.0
"""The limit for Spark to report why a supervisor was lost."""


class Tasks(Protocol):
    """The tasks of the supervisors: a Spark job (SparkJob), or threads (SupervisorThreads)."""

    ended: bool
    problem: BaseException | None
    restarts: bool
    """Whether Spark starts a failed task again by itself (not in a barrier stage)."""

    @property
    def silence(self) -> str:
        """The note while no supervisor has reported."""

    def computing(self, ranks: int) -> bool: ...
    def slots(self) -> int: ...
    def leaving(self, executors: set[str]) -> tuple[set[str], float]: ...
    def source_stall(self, limit: float) -> SourceStall | None: ...
    def give_up(self, executor: str) -> None: ...
    def cancel(self, reason: str) -> None: ...
    def join(self, seconds: float = ...) -> None: ...


class GivenBack(Exception):
    """Only some slots came. They are given back, as another gang may hold the rest and wait for these.

    deadline : the monotonic time until which slots may come; time in which Spark computed the sources does not count.
    """

    def __init__(self, text: str, deadline: float) -> None:
        super().__init__(text)
        self.deadline = deadline


def await_formed(
    coordinator: Coordinator, attempt: Attempt, tasks: Tasks, waited: float = 0.0, *, hold: float | None = None
) -> None:
    """Wait until every rank is ready, or the gang or its tasks have ended.

    waited : the seconds of `start_timeout` that have passed already.
    hold   : the seconds without a further rank after which GivenBack is raised, where ranks start one by one.

    Time in which Spark computes the sources does not count. Raises StartTimeout, and Stalled for a source that hangs.
    """
    reported_members, newest = 0, 0.0
    gang, cancelled, now = attempt.gang, attempt.cancellation.requested, time.monotonic()
    deadline, began, next_word = now + gang.start_timeout - waited, now, now + FIRST_WORD_SECONDS
    over = told = shown = False
    while not over and (now := time.monotonic()) < deadline:
        with coordinator.changed:
            over = coordinator.changed.wait_for(
                lambda: coordinator.formed or coordinator.failure is not None or tasks.ended or cancelled.is_set(),
                timeout=min(LOOK_SECONDS, deadline - now),
            )
        attempt.cancellation.check()
        if len(coordinator.members) != reported_members:
            reported_members, newest = len(coordinator.members), time.monotonic()
        if hold is not None and not over and 0 < reported_members < attempt.ranks and time.monotonic() - newest > hold:
            raise GivenBack(f"{reported_members} of {attempt.ranks} slots came, and no more for {hold:.0f} s", deadline)
        if not over and tasks.computing(attempt.ranks):
            deadline = time.monotonic() + gang.start_timeout
            told = tell_source_stall(attempt, tasks, told)
        if not over and not shown and now > began + WAITING_SECONDS:  # Not as a note, as the first time takes so long.
            shown = True
            attempt.recorder.event(Waiting(text=waiting_for(coordinator, attempt, tasks)))
        if not over and now > next_word:
            next_word = now + (now - began)
            attempt.recorder.note(waiting_for(coordinator, attempt, tasks))
    if over:
        return
    missing = coordinator.missing()
    reported = attempt.ranks - len(missing)
    raise StartTimeout(
        f"{reported} of {attempt.ranks} ranks were ready after start_timeout={gang.start_timeout:g} s. Still missing: "
        f"{whereabouts(coordinator, missing)}. Raise start_timeout, or free slots on the cluster.",
        missing=missing,
    )


def ranks_now(coordinator: Coordinator) -> list[dict[str, Any]]:
    """Return what each rank does by its last heartbeat, as `ranks.json` has it."""
    reported = [(m.rank, m.status) for m in list(coordinator.members.values()) if m.rank is not None and m.status]
    names = ("phase", "memory", "gpu", "gpu_memory")
    return [
        {"rank": rank, **{name: getattr(status, name) for name in names}}
        for rank, status in sorted(reported, key=lambda pair: pair[0])
    ]


def tell_source_stall(attempt: Attempt, tasks: Tasks, told: bool) -> bool:
    """Note once that the sources make no progress. Raises Stalled after the stall's limit, if `on_stall="end"`.

    told : whether it was noted before.
    Returns whether the sources are stalled now.
    """
    stall = tasks.source_stall(attempt.gang.stall_timeout)
    if stall is None:
        return False
    if attempt.gang.on_stall == "end" and stall.seconds > stall.limit:
        facts: dict[str, Any] = {"rank": None, "host": None, "pid": None, "step": None, "phase": "source", "stacks": {}}
        facts |= {"seconds": stall.seconds, "stage": stall.stage, "tasks": stall.tasks}
        facts |= {"traceback": "", "log": [], "signal": None, "exit_code": None, "memory": None, "lost": False}
        text = stall.text[0].upper() + stall.text[1:]
        headline = stall.text.partition("\n")[0].rstrip(".")
        raise Stalled(text, headline=headline, run_dir=attempt.recorder.run_dir, **facts)
    if not told:
        end = f" The run ends after {stall.limit:g} s without progress." if attempt.gang.on_stall == "end" else ""
        attempt.recorder.event(
            GangStalled(text=stall.text, stage=stall.stage, tasks=stall.tasks, seconds=stall.seconds)
        )
        attempt.recorder.note(stall.text + end)
    return True


def waiting_for(coordinator: Coordinator, attempt: Attempt, tasks: Tasks) -> str:
    """Return the reason why a gang has not formed yet."""
    return missing_note(coordinator, attempt.ranks) if coordinator.members else tasks.silence


def missing_note(coordinator: Coordinator, ranks: int) -> str:
    """Return a note with the missing ranks and their places."""
    missing = coordinator.missing()
    return f"{ranks - len(missing)} of {ranks} ranks have reported; still missing: {whereabouts(coordinator, missing)}"


def whereabouts(coordinator: Coordinator, missing: Sequence[int]) -> str:
    """Describe up to 8 missing tasks: `task 1 (not started: no slot, …); task 3 (host b, importing torch for 12 s)`."""
    more = f"; and {len(missing) - 8} more" if len(missing) > 8 else ""
    return "; ".join(_whereabouts(coordinator, partition) for partition in missing[:8]) + more


def _whereabouts(coordinator: Coordinator, partition: int) -> str:
    member = coordinator.members.get(partition)
    if member is None:
        return f"task {partition} (not started: no slot, or its source is still being computed)"
    status, now = member.status, time.monotonic()
    if status is None:
        return f"task {partition} (host {member.host}, starting for {now - member.joined:.0f} s)"
    state = f", its process is {STATES[status.state]}" if status.state in STATES else ""
    seconds = status.seconds + now - status.heard
    return f"task {partition} (host {member.host}, {status.phase} for {seconds:.0f} s{state})"


def await_end(coordinator: Coordinator, attempt: Attempt, tasks: Tasks) -> None:
    """Wait until every rank has returned and the tasks have ended. Raises the error of the first failure."""
    over, elastic, cancelled = False, attempt.ranks < attempt.gang.most, attempt.cancellation.requested
    while not over:
        with coordinator.changed:
            over = coordinator.changed.wait_for(
                lambda: coordinator.failure is not None or tasks.ended or cancelled.is_set(),
                # Never endless, as Python would miss a signal that comes between its last check and the wait itself.
                GROW_SECONDS if elastic else SIGNAL_SECONDS,
            )
        attempt.cancellation.check()
        attempt.recorder.ranks(ranks_now(coordinator))
        if not over:
            announce_end(coordinator, attempt, tasks)
            elastic = elastic and not announce_slots(coordinator, attempt, tasks)
    # With a coordinator on an executor no member reports to this one.
    unfinished = bool(coordinator.members) and not coordinator.finished
    if coordinator.failure is None and (tasks.problem is not None or unfinished):
        # The coordinator may be about to receive the failure that ended the tasks, and knows more of it.
        coordinator.no_one_returns()
        with coordinator.changed:
            coordinator.changed.wait_for(lambda: coordinator.failure is not None, timeout=LEAVE_SECONDS)
    if coordinator.failure is not None:
        lost = coordinator.failure.how == "lost"
        taken = lost or coordinator.failure.type.endswith(IncompleteShard.__name__)
        if not taken or tasks.restarts:
            coordinator.await_gone(LEAVE_SECONDS, but=1)
        else:  # Spark has lost a task or its rows. It may report why, and then ends the job by itself.
            tasks.join(WHY_SECONDS if lost else LEAVE_SECONDS)
        why = tasks.problem  # Read before the job is cancelled below, which is a problem, too.
        if not tasks.ended:
            tasks.cancel(f"because {coordinator.failure.headline()}")
            coordinator.abort("its Spark job has been cancelled")
            tasks.join(LEAVE_SECONDS)
            if lost and not tasks.restarts:
                for member in list(coordinator.members.values()):
                    if member.best_number == coordinator.failure.rank and member.spark_executor:
                        tasks.give_up(member.spark_executor)
        if isinstance(why, JobFailed) and why.jvm_gone:
            raise why
        if why is not None and taken and (is_cancelled(why) or isinstance(why, IncompleteShard)):
            raise why  # The job was cancelled, or lost map output, which explains the lost rank.
        if isinstance(why, JobFailed) and taken and not lost and not why.lost:
            raise why  # Spark could not write the rows, and never will.
        if why is not None and lost:
            if not isinstance(why, TritiumError):
                raise why  # Unexpected, in a supervisor of on="driver": a retry can't help.
            text = (why.reason if isinstance(why, JobFailed) else str(why)).rstrip(".")
            told = replace(coordinator.failure, text=text).error(attempt.recorder.run_dir)
            if isinstance(told, TritiumError):
                told.spark_error = why.spark_error
            raise told
        error = coordinator.failure.error(attempt.recorder.run_dir)
        if isinstance(why, JobFailed) and isinstance(error, IncompleteShard):
            error = IncompleteShard(f"{error} Spark says: {why.reason}", **error.__dict__)
        raise error
    if tasks.problem is not None:
        raise tasks.problem


def announce_slots(coordinator: Coordinator, attempt: Attempt, tasks: Tasks) -> bool:
    """Announce to the ranks that there are slots for more of them, and return whether there are."""
    if (slots := tasks.slots()) <= attempt.ranks:
        return False
    most = min(slots, attempt.gang.most)
    attempt.recorder.note(f"there are slots for {most} ranks again: the gang grows at the end of an epoch")
    coordinator.tell_all("more")
    return True


def announce_end(coordinator: Coordinator, attempt: Attempt, tasks: Tasks) -> None:
    """Announce to the ranks, once, that Spark decommissions an executor of theirs, or that `max_runtime` has passed.

    Raises MaxRuntimeReached GRACE_SECONDS after that, where the function has not ended or saved a checkpoint.
    """
    late = time.monotonic() - attempt.deadline
    if late > GRACE_SECONDS:
        raise out_of_time(attempt)
    if late > 0 and coordinator.notice != MAX_RUNTIME:
        attempt.recorder.note(f"{MAX_RUNTIME}: the ranks save a checkpoint, and end")
        announce(coordinator, MAX_RUNTIME, GRACE_SECONDS)
    if coordinator.notice:
        return
    members = {m.spark_executor: m for m in list(coordinator.members.values()) if m.spark_executor}
    leaving, seconds = tasks.leaving(set(members))
    if leaving:
        where = ", ".join(f"executor {executor} on {members[executor].host}" for executor in sorted(leaving))
        reason = f"Spark decommissions {where}"
        left = "" if math.isinf(seconds) else f" within {seconds:g} s"
        attempt.recorder.note(f"{reason}: the ranks save a checkpoint{left}, and start again elsewhere")
        announce(coordinator, reason, seconds)


def announce(coordinator: Coordinator, reason: str, seconds: float) -> None:
    """Announce to every rank that its gang ends in so many seconds: `World.preempted`."""
    coordinator.notice = reason
    coordinator.tell_all("notice", seconds=seconds)


def out_of_time(attempt: Attempt) -> MaxRuntimeReached:
    """Return the error for a run that has reached `max_runtime`."""
    limit = attempt.gang.max_runtime
    return MaxRuntimeReached(f"The run was ended after max_runtime={limit:g} s.", limit=limit)


def is_cancelled(problem: BaseException) -> bool:
    """Tell whether a Spark job ended because it was cancelled."""
    return isinstance(problem, JobFailed) and problem.cancelled
