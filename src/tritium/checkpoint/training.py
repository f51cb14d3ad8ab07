"""The checkpoint of a training: named parts of it, each of which says what it keeps (rank)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tritium.checkpoint.checkpoints import Checkpoints
from tritium.checkpoint.format import Loaded
from tritium.checkpoint.identity import refuse_another
from tritium.errors import BadSetting


class Stateful(Protocol):
    """A part of a training, as a checkpoint keeps it. What it returns is made of what `world.checkpoint.save` takes."""

    def shared(self) -> Any:
        """Return what is equal on every rank; that of rank 0 is kept. Every rank calls it, so it may be collective."""

    def own(self) -> Any:
        """Return what is this rank's own, or None. Called after `shared`, on every rank."""

    def restore(self, shared: Any, own: Sequence[Any]) -> None:
        """Continue from what was kept: `own` of all ranks that there were then, in rank order."""


@dataclass(frozen=True)
class Shared:
    """A part that is equal on every rank."""

    take: Callable[[], Any]
    put: Callable[[Any], object]

    def shared(self) -> Any:
        return self.take()

    def own(self) -> None:
        return None

    def restore(self, shared: Any, own: Sequence[Any]) -> None:
        self.put(shared)


@dataclass(frozen=True)
class Own:
    """A part that each rank has for itself, and gets back where there was a rank of its number."""

    rank: int
    take: Callable[[], Any]
    put: Callable[[Any], object]
    size: int | None = None
    """The number of ranks that there must have been; None: any."""
    missing: Callable[[], object] = lambda: None
    """Called in place of `put` where there is nothing to get back."""

    def shared(self) -> None:
        return None

    def own(self) -> Any:
        return self.take()

    def restore(self, shared: Any, own: Sequence[Any]) -> None:
        if self.rank < len(own) and self.size in (None, len(own)):
            self.put(own[self.rank])
        else:
            self.missing()


class Collective:
    """A part that each rank has for itself, of which every rank gets back what all had."""

    def __init__(self, take: Callable[[], Any]) -> None:
        self._take = take
        self.restored: list[Any] | None = None
        """What all ranks had, in rank order; None without a checkpoint."""

    def shared(self) -> None:
        return None

    def own(self) -> Any:
        return self._take()

    def restore(self, shared: Any, own: Sequence[Any]) -> None:
        self.restored = list(own)


class CheckpointSettings(Protocol):
    """What the user has said about checkpoints."""

    @property
    def checkpoint_every(self) -> Any: ...
    @property
    def checkpoint_keep(self) -> int: ...
    @property
    def keeps_checkpoints(self) -> bool: ...
    @property
    def rounds(self) -> int:
        """How many epochs or iterations a training has."""


class EndsTraining(Protocol):
    """What may end a training before its last epoch or iteration. It has no weights here: they are a part."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any], rounds: int) -> None: ...
    def stays_stopped(self, stopped: bool, state: Mapping[str, Any]) -> bool: ...


class CheckpointWorld(Protocol):
    """The gang, as a checkpoint of one of its ranks needs it."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def checkpoint(self) -> Checkpoints: ...
    def note(self, text: str) -> None: ...


class TrainingCheckpoint:
    """The parts of a training, saved as often as the settings say, and restored from an earlier attempt or run.

    A part is saved and restored in the order of `parts`.
    """

    def __init__(
        self,
        world: CheckpointWorld,
        settings: CheckpointSettings,
        identities: Mapping[str, Any],
        history: list[dict[str, Any]],
        early_stopping: EndsTraining,
        parts: Mapping[str, Stateful],
        *,
        run_dir_required: bool,
    ) -> None:
        """Keep nothing yet.

        identities : "identity", which must be equal for a training to continue, and others, for `peek` on the driver.
        history : an entry for each epoch or iteration, which `load` fills.
        run_dir_required : the user named the run directory, so it is an error when a rank does not reach it. Otherwise
            a training whose ranks do not share a disk runs without checkpoints, and logs that.
        """
        self._world, self._settings, self._identities = world, settings, identities
        self._history, self._early_stopping, self._parts = history, early_stopping, parts
        self._on, self._run_dir_required = settings.keeps_checkpoints, run_dir_required
        self._saved: Loaded | None = None
        self._stopped = False
        self.step = 0
        """The step of the checkpoint that was loaded."""
        self.finished = False
        """Whether nothing is left to train."""

    @property
    def rounds(self) -> int:
        """The number of epochs or iterations in all: those that were done, where something has ended the training."""
        return len(self._history) if self._stopped else self._settings.rounds

    def load(self) -> Loaded | None:
        """Read the newest checkpoint of the run directory, if there is one, and restore history and early stopping.

        `restore` restores the parts. A collective call. Raises BadSetting for the checkpoint of another training.
        """
        if not self._on:
            return None
        try:
            saved = self._world.checkpoint.load()
        except BadSetting as error:
            if self._run_dir_required:
                raise
            self._on = False
            if self._world.rank == 0:
                self._world.note(f"no checkpoints, so a retry starts from the beginning: {error}")
            return None
        if saved is None:
            return None
        now, resized = self._identities["identity"], saved.size != self._world.size
        refuse_another(saved.get("identity"), now, saved.path, resized=resized)
        self._saved, self.step, self._history[:] = saved, saved.step, saved["history"]
        self._early_stopping.load_state_dict(saved["early_stopping"], len(self._history))
        self._stopped = self._early_stopping.stays_stopped(saved["stopped"], saved["early_stopping"])
        self.finished = saved["finished"] and len(self._history) >= self.rounds
        return saved

    def restore(self) -> bool:
        """Restore the parts; return False without a checkpoint, where nothing is changed."""
        if self._saved is None:
            return False
        for name, part in self._parts.items():
            part.restore(*self.kept(name))
        self._saved = None
        return True

    def kept(self, name: str) -> tuple[Any, list[Any]]:
        """Return what the loaded checkpoint has of a part, for `Stateful.restore`; not after `restore`."""
        assert self._saved is not None
        return self._saved["parts"].get(name), [
            None if states is None else states.get(name) for states in self._saved.own
        ]

    def save(self, step: int) -> bool:
        """Save after a step, when `checkpoint_every` says so, and return whether it did."""
        return self._on and self._save(step, every=self._settings.checkpoint_every)

    def regroup(self, step: int) -> None:
        """Save and start again between two epochs or iterations, if the gang could be larger."""
        if self._on and len(self._history) < self.rounds:
            keep = self._settings.checkpoint_keep
            self._world.checkpoint.regroup(self._shared, step, own=self._own, keep=keep)

    def finish(self, step: int) -> None:
        """Save after the last epoch, so that a later fit with this run directory finds the training finished."""
        if self._on and self._run_dir_required and not self.finished:
            self.finished, self._stopped = True, len(self._history) < self._settings.rounds
            self._save(step, every=None)

    def _save(self, step: int, *, every: Any) -> bool:
        keep = self._settings.checkpoint_keep
        return self._world.checkpoint.save(self._shared, step, own=self._own, every=every, keep=keep)

    def _shared(self) -> dict[str, Any]:
        return {
            **self._identities,
            "early_stopping": self._early_stopping.state_dict(),
            "rounds": self._settings.rounds,
            "history": self._history,
            "finished": self.finished,
            "stopped": self._stopped,
            "parts": {name: part.shared() for name, part in self._parts.items()},
        }

    def _own(self) -> dict[str, Any] | None:
        states = {name: part.own() for name, part in self._parts.items()}
        return {name: state for name, state in states.items() if state is not None} or None
