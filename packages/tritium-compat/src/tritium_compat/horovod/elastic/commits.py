"""Commits in the run directory: when they are written, and what a gang that was started again takes of them (rank)."""

from __future__ import annotations

import os
import pickle
import sys
import time
import warnings
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import cloudpickle
import numpy as np

from tritium import World, world
from tritium.errors import BadSetting, TritiumWarning
from tritium_compat.horovod.elastic.state import State
from tritium_compat.horovod.errors import HostsUpdatedInterrupt

SECONDS = 10.0
_VARIABLE = "TRITIUM_COMMIT_SECONDS"
_PICKLED = "pickled by tritium"
_DUE, _RESTARTS = 1, 2

_calls: Counter[str] = Counter()  # of functions of `elastic.run`, in each run of this process
_newest: dict[str, Any] = {}  # what a run's directory held when this process first asked


class Commits:
    """The commits of one call of a function of `elastic.run`.

    A commit is written when the last one was begun TRITIUM_COMMIT_SECONDS ago (10), by rank 0's clock: that much of the
    training, and the time of writing, is done again after a loss.
    """

    def __init__(self) -> None:
        self._world: World = world()
        self._call = _calls[self._world.run_id]
        _calls[self._world.run_id] += 1
        self._number = 0  # of the last commit; it never decreases
        self._written = -1e9  # when, by this process's clock
        self._seconds = _seconds()
        self._on = bool(self._world.run_dir)
        self._restarts = False
        """Whether rank 0 has decided that this gang is to end: a function may raise HostsUpdatedInterrupt itself."""

    def restore(self, state: State) -> bool:
        """Let the state be the newest one that was written for this call, if any, and return whether there is one."""
        if not self._on:
            return False
        if state.kept() is None:
            self._keep_in_memory(f"{type(state).__name__} does not say what is to be written (kept, take_kept)")
            return False
        try:
            if self._world.run_id not in _newest:
                _newest[self._world.run_id] = self._world.checkpoint.load()
        except BadSetting as error:
            self._keep_in_memory(str(error))
            return False
        loaded = _newest[self._world.run_id]
        if loaded is None:
            return False
        self._number = loaded.step
        if loaded.get("horovod.elastic call") != self._call:
            return False
        state.take_kept(_unpacked(loaded["state"]))
        state.restore()
        return True

    def agree(self, state: State) -> None:
        """Take rank 0's count of commits: an error may have ended one of them on some ranks only."""
        self._number = state._bcast_object(self._number)

    def commit(self, state: State) -> None:
        """Write the state that was just saved if it is time to; raise HostsUpdatedInterrupt if the gang restarts."""
        self._number += 1
        if not self._on:
            return
        due, self._restarts = self._ask(state)
        if due:
            self._write(state)
        if self._restarts:
            raise HostsUpdatedInterrupt

    def check(self, state: State) -> None:
        """Raise HostsUpdatedInterrupt on every rank if the gang can grow."""
        if self._on and self._world._control.elastic:
            self._restarts = self._ask(state)[1]
            if self._restarts:
                raise HostsUpdatedInterrupt

    def grow(self, state: State) -> None:
        """Write the state, and end this gang, to be started again elsewhere or larger; return if it is not to end."""
        if self._restarts:
            self._number += 1
            self._world.checkpoint.restart(lambda: self._packed(state), self._number)

    def _ask(self, state: State) -> tuple[bool, bool]:
        """Return what rank 0 decides: whether to write now, and whether to end the gang, as it is to go or can grow."""
        now = time.monotonic()
        due = now - self._written >= self._seconds
        restarts = self._world._control.could_be_more or self._world.preempted is not None
        if self._world.size > 1:
            answer = state._bcast_object(_DUE * due + _RESTARTS * restarts)
            return bool(answer & _DUE), bool(answer & _RESTARTS)
        return due, restarts

    def _write(self, state: State) -> None:
        self._written = time.monotonic()
        self._world.checkpoint.save(lambda: self._packed(state), self._number)

    def _packed(self, state: State) -> dict[str, Any]:
        return {"horovod.elastic call": self._call, "state": _packed(state.kept())}

    def _keep_in_memory(self, why: str) -> None:
        self._on = False
        if self._world.rank == 0:
            text = f"Commits are kept in memory only, so that a training that loses a rank starts over. {why}"
            warnings.warn(text, TritiumWarning, stacklevel=4)
            self._world.note(text)


def _seconds() -> float:
    given = os.environ.get(_VARIABLE, str(SECONDS))
    try:
        found = float(given)
    except ValueError:
        found = -1.0
    if not found >= 0:
        raise BadSetting(f"{_VARIABLE}={given!r} must be a number of seconds, 0 or more.", setting=_VARIABLE)
    return found


def _packed(value: Any) -> Any:
    """Return the value with what a checkpoint can't hold pickled."""
    if isinstance(value, Mapping) and all(type(key) in (str, int, float, bool) for key in value):
        kind = OrderedDict if type(value) is OrderedDict else dict
        return kind((key, _packed(one)) for key, one in value.items())
    if type(value) in (list, tuple):
        return type(value)(map(_packed, value))
    if _is_plain(value):
        return value
    return {_PICKLED: np.frombuffer(cloudpickle.dumps(value), np.uint8)}


def _unpacked(value: Any) -> Any:
    if isinstance(value, Mapping):
        if _PICKLED in value:
            return pickle.loads(value[_PICKLED].tobytes())
        return type(value)((key, _unpacked(one)) for key, one in value.items())  # type: ignore[call-arg]
    if type(value) in (list, tuple):
        return type(value)(map(_unpacked, value))
    return value


def _is_plain(value: Any) -> bool:
    torch: Any = sys.modules.get("torch")
    return (
        value is None
        or type(value) in (bool, int, float, str)
        or (torch is not None and isinstance(value, torch.Tensor))
        or (isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc")
    )
