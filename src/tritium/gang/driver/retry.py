"""Start a gang again after a loss; raise any other error at once (driver)."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tritium.checkpoint.control import Regroup
from tritium.errors import (
    BadRow,
    DataChanged,
    IncompleteShard,
    JobFailed,
    MaxRuntimeReached,
    RankFailed,
    SetupError,
    TritiumError,
    masked,
)
from tritium.events import GangRetried
from tritium.gang.driver.outcome import out_of_time
from tritium.gang.killed import from_outside

if TYPE_CHECKING:
    from tritium.gang.driver.attempt import Attempt
    from tritium.gang.driver.recorder import Recorder

KILLS = 3
"""A rank that was killed this often at the same step is not retried."""


def run_with_retries(attempt: Attempt, run: Callable[[Attempt], list[Any]]) -> list[Any]:
    """Return `run(attempt)`; after a loss, run again as often as the gang's `retries` allow.

    A Regroup (a host is taken away, or the gang can grow) starts it again without counting as a retry.
    """
    losses: list[TritiumError] = []
    attempts = itertools.count()
    while True:
        try:
            return run(replace(attempt, number=next(attempts)))
        except Regroup:
            if time.monotonic() > attempt.deadline:
                error = out_of_time(attempt)
                finish(error, attempt.recorder)
                raise error from None
            continue
        except TritiumError as error:
            losses.append(error)
            over = why_given_up(losses, attempt.gang.retries) if attempt.gang.on != "here" and is_loss(error) else ""
            if over is not None:
                finish(error, attempt.recorder, [*history(losses), over] if len(losses) > 1 else [])
                raise
        start = attempt.recorder.newest[0] if attempt.recorder.newest else None
        reason = headline(losses[-1])
        attempt.recorder.event(GangRetried(number=len(losses), of=attempt.gang.retries, start=start, reason=reason))
        attempt.recorder.note(
            f"{reason}. Retry {len(losses)} of {attempt.gang.retries}, "
            + (f"from the checkpoint of step {start}" if start is not None else "from the beginning: no checkpoint yet")
        )


def is_loss(error: TritiumError) -> bool:
    """Tell whether the gang was lost (a killed rank, a lost executor, lost map output), so that a retry may help."""
    return isinstance(error, IncompleteShard) or error.lost


def why_given_up(losses: list[TritiumError], retries: int) -> str | None:
    """Return why there is no further attempt; None when there is one.

    The last loss is marked `out_of_memory` where that is the probable reason.
    """
    killed = [error for error in losses if isinstance(error, RankFailed) and error.signal == "SIGKILL"]
    kills = Counter((error.rank, error.step) for error in killed)
    for (rank, step), times in kills.items():
        if times >= KILLS:
            where = "" if step is None else f" at step {step}"
            figures = [error.memory or {} for error in killed if error.rank == rank]
            if all(map(from_outside, figures)):
                return (
                    f"Given up: rank {rank} was killed by SIGKILL {times} times{where}, and not for want of memory. "
                    "Find out who sends that signal: a cluster manager, a limit, a person."
                )
            losses[-1].out_of_memory = True
            return (
                f"Given up: rank {rank} was killed by SIGKILL {times} times{where}, so it is probably out of memory. "
                "Give it more memory, a smaller batch, or fewer ranks to a host."
            )
    if len(losses) > retries:
        return f"Given up after {len(losses)} attempts (retries={retries})." if retries else ""
    return None


def history(losses: list[TritiumError]) -> list[str]:
    """Return one line for each attempt."""
    return [f"Attempt {number}: {headline(error)}." for number, error in enumerate(losses, 1)]


def headline(error: TritiumError) -> str:
    """Return the first sentence of an error's message."""
    return (error.headline or str(error).partition("\n")[0]).rstrip(".")


def finish(error: TritiumError, recorder: Recorder, tried: Sequence[str] = ()) -> None:
    """Append to the message the attempts in `tried`, the places of logs and checkpoints, and how to continue.

    A SetupError is left as it is where nothing has started.
    """
    if isinstance(error, SetupError) and not tried and recorder.newest is None:
        return
    places = []
    if tried or isinstance(error, (RankFailed, JobFailed, IncompleteShard, MaxRuntimeReached)):
        places += [f"Logs and events of the whole run: {recorder.run_dir}"]
    if recorder.newest is not None:
        step, path = recorder.newest
        places += [f"Newest checkpoint: step {step}, in {path}"]
        if not isinstance(error, (BadRow, DataChanged)):  # The same call would raise these again.
            places += [f'Next: the same call with run_dir="{recorder.run_dir}" continues from there.']
    paragraphs = [str(error).rstrip(), "\n".join(filter(None, tried)), "\n".join(places)]
    error.args = (masked("\n\n".join(filter(None, paragraphs))),)
