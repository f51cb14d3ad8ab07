"""The state of a training: committed in memory, and now and then in the run directory (rank)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol


class Committer(Protocol):
    """What writes a state to the run directory."""

    def commit(self, state: State) -> None: ...
    def check(self, state: State) -> None: ...


class State:
    """What a training continues from. Subclasses say what it is: `save`, `restore`, `sync`."""

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        """Make a state.

        bcast_object : returns rank 0's object on every rank.
        get_rank : returns the number of this rank.
        """
        self._bcast_object, self._rank = bcast_object, get_rank
        self._reset_callbacks: list[Callable[[], Any]] = []
        self._commits: Committer | None = None
        """Set while a function of `elastic.run` is being called."""

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Add functions that are called when the training continues from a commit, maybe with other ranks."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call `reset`, and the functions that were registered."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: Any) -> None:
        """Do nothing: Tritium's driver tells the ranks of slots, see `check_host_updates`."""

    def commit(self) -> None:
        """Save the state in memory, and in the run directory if it is time to, and call `check_host_updates`.

        Every rank calls it at the same place in its program.
        """
        self.save()
        if self._commits is not None:
            self._commits.commit(self)

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt on every rank when a gang that is smaller than its most can grow."""
        if self._commits is not None:
            self._commits.check(self)

    def save(self) -> None:
        """Save the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to what was last saved in memory."""
        raise NotImplementedError

    def sync(self) -> None:
        """Take rank 0's state, on every rank."""
        raise NotImplementedError

    def reset(self) -> None:
        """Do what a subclass needs when the training continues from a commit."""

    def kept(self) -> Mapping[str, Any] | None:
        """Return what was last saved, to be written to the run directory; None: this kind is kept in memory only."""
        return None

    def take_kept(self, kept: Mapping[str, Any]) -> None:
        """Take what `kept` returned, in a process that was started later, as the state that was last saved."""
        raise NotImplementedError


class ObjectState(State):
    """Values that are attributes: `ObjectState(…, epoch=0)` has `state.epoch`."""

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        """Make a state of the values of `kwargs`, which can be pickled."""
        super().__init__(bcast_object, get_rank)
        self._saved_state: dict[str, Any] = {}
        for name, value in kwargs.items():
            setattr(self, name, value)
            self._saved_state[name] = copy.deepcopy(value)

    def save(self) -> None:
        """Save the values in memory."""
        self._saved_state = {name: copy.deepcopy(getattr(self, name)) for name in self._saved_state}

    def restore(self) -> None:
        """Go back to the values that were last saved."""
        for name, value in self._saved_state.items():
            setattr(self, name, copy.deepcopy(value))

    def sync(self) -> None:
        """Take rank 0's values, and save them."""
        if self._saved_state:
            now = self._bcast_object({name: getattr(self, name) for name in self._saved_state})
            for name, value in now.items():  # on rank 0 these are the objects themselves
                setattr(self, name, value)
            self._saved_state = copy.deepcopy(now)

    def kept(self) -> Mapping[str, Any] | None:
        """Return the values that were last saved."""
        return {"values": self._saved_state}

    def take_kept(self, kept: Mapping[str, Any]) -> None:
        """Take values as those that were last saved; those that this program no longer has are left out."""
        self._saved_state |= {name: value for name, value in kept["values"].items() if name in self._saved_state}
