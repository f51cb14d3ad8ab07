"""`elastic.run`: calls a function from the last commit on, again when a collective fails (rank)."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from tritium import world
from tritium.errors import BadSetting
from tritium_compat.horovod.elastic.commits import Commits
from tritium_compat.horovod.elastic.state import State
from tritium_compat.horovod.errors import HorovodInternalError, HostsUpdatedInterrupt

RESET_LIMIT = "TRITIUM_RESET_LIMIT"
_LIMIT = 3


def run_fn(func: Callable[..., Any], reset: Callable[[], None]) -> Callable[..., Any]:
    """Return a function of a state that calls `func(state, …)` from the last commit on.

    In a gang that was started again after a loss, the state is the newest one in the run directory, and the state's
    reset callbacks are called. When a collective fails although every rank is there, all ranks go back to the last
    commit in memory and call `func` again, at most TRITIUM_RESET_LIMIT times (3).

    reset : connects the ranks again.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        commits, left = Commits(), _limit()
        if commits.restore(state):
            state.on_reset()
        state._commits = commits
        sync = True
        try:
            while True:
                try:
                    if sync:
                        state.sync()
                        commits.agree(state)
                    return func(state, *args, **kwargs)
                except HorovodInternalError:
                    if left == 0 or (world().size > 1 and not world().run_id):
                        raise  # another launcher's ranks can't tell whether one of them is lost
                    left -= 1
                    state.restore()
                    sync = True
                except HostsUpdatedInterrupt as interrupt:
                    state.save()
                    commits.grow(state)
                    sync = not interrupt.skip_sync
                reset()
                state.on_reset()
        finally:
            state._commits = None

    return wrapper


def _limit() -> int:
    given = os.environ.get(RESET_LIMIT, str(_LIMIT))
    if not given.isdecimal():
        raise BadSetting(f"{RESET_LIMIT}={given!r} must be a whole number, 0 or more.", setting=RESET_LIMIT)
    return int(given)
